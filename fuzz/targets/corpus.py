"""Text corpora: plain, compressed, damaged and swollen files against a reading of the whole text at once."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from fastqt.errors import InputError
from fastqt.text import Corpus, Vocabulary, read_blocks, reader
from fuzz.files import text_file
from fuzz.refusals import check_file_refusal
from fuzz.source import Bytes

BLOCKS = (1 << 18, 3, 7, 64)
VOCABULARY = Vocabulary.build(["one two three . , ( )"], 12)


def run(data: bytes) -> bool:
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
    found = [
        (sentence, block.documents[i], block.lines[i])
        for block in blocks
        for i, sentence in enumerate(block.sentences)
    ]
    with reader.open_text(str(path)) as file:
        assert found == _read_whole(file.read())
    assert len(corpus) == len(found)
    if found:
        sample = corpus.sample(np.arange(len(found))[:8])
        assert ((sample.tokens >= 0) & (sample.tokens < len(VOCABULARY))).all()
        positions = [block.position(i) for block in blocks for i in range(len(block.sentences))]
        assert all(a.offset < b.offset for a, b in pairwise(positions))
        done = reopen % len(positions)
        rest = read_blocks([str(path)], positions[done])
        assert [sentence for block in rest for sentence in block.sentences] == [
            x[0] for x in found[done + 1 :]
        ]
    return True


def _read_whole(text: bytes) -> list[tuple[str, int, int]]:
    """(sentence, document, line) of every sentence."""
    found, document, new = [], -1, True
    for number, line in enumerate(text.decode().removeprefix("\ufeff").split("\n"), start=1):
        if not line.strip():
            new = True
            continue
        document += new
        new = False
        found.append((line.strip(), document, number))
    return found
