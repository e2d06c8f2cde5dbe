"""Text files of other systems: a byte order mark, carriage returns, how the last line ends."""

import numpy as np
import pytest

from fastqt.errors import InputError
from fastqt.sentences.evaluation.captions import read_captions
from fastqt.sentences.evaluation.data import read_labelled, read_pairs
from fastqt.sentences.evaluation.judged import read_judged
from fastqt.sentences.json_text import read_object
from fastqt.sentences.text import Vocabulary, read_blocks, read_triplets
from fastqt.sentences.text.vectors import read_counts, read_vectors
from tests.shared.tokenizer_files import TOKENIZERS

JUDGED = {
    "corpus.jsonl": b'{"_id": "d", "title": "", "text": "the cat"}\n{"_id": "e", "text": "it"}\n',
    "queries.jsonl": b'{"_id": "q", "text": "a cat"}\n',
    "qrels/test.tsv": b"query-id\tcorpus-id\tscore\nq\td\t1\nq\te\t0\n",
}


def judged_with(name):
    """Reads a retrieval set with another file of this name, the one at a path."""

    def read(path):
        folder = path.parent / "set"
        (folder / "qrels").mkdir(parents=True, exist_ok=True)
        for each, text in JUDGED.items():
            (folder / each).write_bytes(path.read_bytes() if each == name else text)
        return read_judged(folder)

    return read


VOCABULARY = Vocabulary.build(["the cat sat"], 5).to_json().encode()
SUB_WORDS = TOKENIZERS["bpe"]().to_str(pretty=True).encode()
# A reader of a path, and what it reads.
READERS = {
    "corpus": (
        lambda path: [text for each in read_blocks([str(path)]) for text in each.sentences],
        b"the cat\nsat\n",
    ),
    "triplets": (lambda path: [*read_triplets([str(path)])], b"a cat\tthe cat\na mat\tthe mat\n"),
    "labelled": (lambda path: read_labelled(path), b"1\tthe cat\n0\tsat\n1\ton it\n"),
    "label last": (lambda path: read_labelled(path, text=2), b"1\tx\tthe cat\n0\ty\tsat\n"),
    "pairs": (lambda path: read_pairs(path, gold=0, first=1), b"1\ta cat\ta mat\n2.5\tit\tis\n"),
    "captions": (lambda path: read_captions(str(path), 2), b"a cat\na mat\n"),
    "counts": (read_counts, b"the 5\ncat 3\n"),
    "vectors": (read_vectors, b"the 1 2\ncat 3 4\n"),
    "vectors with a header": (read_vectors, b"2 2\nthe 1 2\ncat 3 4\n"),
    "object": (lambda path: read_object(path, most_bytes=99), b'{"a":\n1}\n'),
    "vocabulary": (lambda path: Vocabulary.load(path).to_json(), VOCABULARY),
    **{name: (judged_with(name), text) for name, text in JUDGED.items()},
    "sub-words": (lambda path: Vocabulary.load(path, max_length=9).to_json(), SUB_WORDS),
}
CHANGES = {
    "a byte order mark": lambda text: b"\xef\xbb\xbf" + text,
    "carriage returns": lambda text: text.replace(b"\n", b"\r\n"),
    "no line feed at the end": lambda text: text.removesuffix(b"\n"),
    "a blank line at the end": lambda text: text + b"\n",
    "all of it": lambda text: b"\xef\xbb\xbf" + (text + b"\n").replace(b"\n", b"\r\n"),
}


def plain(value):
    if isinstance(value, np.ndarray):
        return value.tolist()
    return [plain(each) for each in value] if isinstance(value, (tuple, list)) else value


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize(("read", "text"), READERS.values(), ids=READERS)
def test_a_reader_gives_the_same(tmp_path, read, text, change):
    (tmp_path / "x.txt").write_bytes(text)
    wanted = plain(read(tmp_path / "x.txt"))
    (tmp_path / "x.txt").write_bytes(change(text))
    assert plain(read(tmp_path / "x.txt")) == wanted


def test_a_file_of_blank_lines_is_empty(tmp_path):
    (tmp_path / "x.txt").write_bytes(b"\xef\xbb\xbf\r\n\r\n")
    with pytest.raises(InputError, match=r"x\.txt is empty"):
        read_labelled(tmp_path / "x.txt")
