"""Text corpora and rows of texts: plain, compressed, damaged and swollen files against a whole reading."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np

from fastqt.errors import InputError
from fastqt.sentences.text import Corpus, Vocabulary, read_blocks, read_triplets, reader
from tests.fuzz.files import text_file
from tests.fuzz.refusals import check_file_refusal
from tests.fuzz.source import Bytes

BLOCKS = (1 << 18, 3, 7, 64)
VOCABULARY = Vocabulary.build(["one two three . , ( )"], 12)


def run_corpus(data: bytes) -> bool:
    source = Bytes(data)
    block_size, reopen = source.choice(BLOCKS), source.integer(0, 255)
    path = text_file(source, "corpus")
    # In small blocks the reader takes a time that grows with the square of the longest line.
    reader.READ_BYTES = max(BLOCKS) if path.name.endswith("bomb.gz") else block_size

    try:
        blocks = list(read_blocks([str(path)]))
        corpus = Corpus([str(path)], VOCABULARY)
    except InputError as error:
        check_file_refusal(error, path)
        return False

    with reader.open_text(str(path)) as file:
        _check_rows(path, file.read())
    sentences = [
        (sentence, block.documents[i], block.lines[i])
        for block in blocks
        for i, sentence in enumerate(block.sentences)
    ]
    with reader.open_text(str(path)) as file:
        assert sentences == _read_whole(file.read())
    assert len(corpus) == len(sentences)

    if sentences:
        sample = corpus.sample(np.arange(len(sentences))[:8])
        assert ((sample.tokens >= 0) & (sample.tokens < len(VOCABULARY))).all()
        positions = [block.position(i) for block in blocks for i in range(len(block.sentences))]
        assert all(a.offset < b.offset for a, b in pairwise(positions))
        done = reopen % len(positions)
        rest = read_blocks([str(path)], positions[done])
        assert [sentence for block in rest for sentence in block.sentences] == [
            x[0] for x in sentences[done + 1 :]
        ]
    return True


def _check_rows(path: Path, text: bytes) -> None:
    """Checks the rows of texts between tabs, or that the file has none."""
    lines = [line for line in text.decode().removeprefix("\ufeff").split("\n") if line.strip()]
    rows = [[each.strip() for each in line.split("\t")] for line in lines]
    usable = all(len(row) == len(rows[0]) > 1 and all(row) for row in rows)
    try:
        assert [row for part in read_triplets([str(path)]) for row in part] == rows
        assert usable
    except InputError as error:
        check_file_refusal(error, path)
        assert not usable


def _read_whole(text: bytes) -> list[tuple[str, int, int]]:
    """(sentence, document, line) of every sentence."""
    sentences, document, new = [], -1, True
    for number, line in enumerate(text.decode().removeprefix("\ufeff").split("\n"), start=1):
        if not line.strip():
            new = True
            continue
        document += new
        new = False
        sentences.append((line.strip(), document, number))
    return sentences
