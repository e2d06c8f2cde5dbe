"""Word vectors and counts are read from files, and what is wrong with a file is said in words."""

import gzip
import io

import numpy as np
import pytest

from fastqt.errors import InputError
from fastqt.sentences.text import limits
from fastqt.sentences.text.limits import table_lines
from fastqt.sentences.text.vectors import read_counts, read_vectors, width_of


def test_lines_are_read_as_they_are(tmp_path):
    path = tmp_path / "x.txt"
    for text in (" a \nb\t\n\n\u00a0c", " a \nb\t\n\n\u00a0c\n\n\n"):
        path.write_text(text)
        assert list(table_lines(path)) == [" a ", "b\t", "", "\u00a0c"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "x.txt is empty"),
        (b"\n\n", "x.txt is empty"),
        (b"a 1\nb nan\n", "vectors: want finite numbers, got NaN or infinity in line 2"),
        (b"a 1\nb 1e999\n", "vectors: want finite numbers"),
        (b"a 1\nb x\n", "line 2: want a word and numbers"),
        (b"a 1\nb 1 2\n", "want a word and equally many numbers a line: line 2 has 2"),
        (b"a\nb\n", "want a word and equally many numbers a line: line 1 has 0"),
        (b"a 1\n\nb 1\n", "want a word and equally many numbers a line: line 2 has 0"),
        (b"2 3\na 1 2\n", "want a word and equally many numbers a line: line 2 has 2"),
        (b"2 2\na 1 2\nb 1\n", "want a word and equally many numbers a line: line 3 has 1"),
        (b"a 1\n\xff 1\n", "x.txt is not UTF-8: line 2"),
    ],
    ids=range(11),
)
def test_text_that_holds_no_vectors_is_refused(tmp_path, data, message):
    (tmp_path / "x.txt").write_bytes(data)
    with pytest.raises(InputError, match=message):
        read_vectors(tmp_path / "x.txt")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("3 2\n</s> 1 2 \nthe 3 4 \n3 5 6 \n", ["</s>", "the", "3"]),  # word2vec and fastText
        (", 1 2\n. . . 3 4\nat name@domain.com 5 6\n", [",", ". . .", "at name@domain.com"]),  # GloVe 840B
        ("new york 1 2\na 3 4\n b 5 6\n", ["new york", "a", " b"]),
        ("2 2\nnew york 1 2\n\u00a0 3 4", ["new york", "\u00a0"]),
        ("the\t1\t2\n3\t3\t4\t\n", ["the", "3"]),
        ("2000 1 2\n10 3 4\n", ["2000", "10"]),
    ],
    ids=range(6),
)
def test_text_as_it_is_published(tmp_path, text, words):
    (tmp_path / "x.txt").write_text(text, encoding="utf-8")
    read = read_vectors(tmp_path / "x.txt")
    assert read.words == words
    assert read.vectors.tolist() == [[2 * n + 1, 2 * n + 2] for n in range(len(words))]
    assert width_of(tmp_path / "x.txt") == 2
    assert read_vectors(tmp_path / "x.txt", words[1:]).words == words[1:]


def test_text_of_one_number_a_line_has_no_header(tmp_path):
    (tmp_path / "x.txt").write_text("5 7\na 3\n")
    assert read_vectors(tmp_path / "x.txt").words == ["5", "a"]


def test_text_larger_than_memory_is_refused(tmp_path, monkeypatch):
    with gzip.open(tmp_path / "x.gz", "w") as file:
        file.write(b"a 1\n" * 1_000_000)
    monkeypatch.setattr(limits, "machine_memory", lambda: 1 << 20)
    with pytest.raises(InputError, match=r"x\.gz: want at most half of this machine's memory, 524,288 bytes"):
        read_vectors(tmp_path / "x.gz")
    monkeypatch.setattr(limits, "LONGEST_LINE", 1000)
    with gzip.open(tmp_path / "x.gz", "w") as file:
        file.write(b"a" * 1_000_000)
    with pytest.raises(InputError, match=r"x\.gz: line 1: want less than 1,000 bytes"):
        read_vectors(tmp_path / "x.gz")


def test_a_file_whose_decompression_takes_too_much_memory_is_refused(monkeypatch):
    """An .xz file may ask for a dictionary of four gigabytes."""

    class Greedy(io.BytesIO):
        def readline(self, *_):
            raise MemoryError

    monkeypatch.setattr("fastqt.sentences.text.reader.lzma.open", lambda *_: Greedy())
    with pytest.raises(InputError, match=r"x\.xz: want a file that this machine's memory can decompress"):
        read_vectors("x.xz")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vectors": np.ones((3, 2))}, "vectors: want 2 rows for as many words, got 3"),
        ({"vectors": np.array([[1, np.nan], [1, 1]])}, "vectors: want finite numbers, .* in row 1"),
        ({"vectors": np.full((2, 2), 1e300)}, "vectors: want finite numbers, .* in row 1"),
        ({"counts": np.array([1])}, "counts: want 2 for as many words, got 1"),
        ({"counts": np.array([1, -1])}, "counts: want none below 0"),
        ({"counts": np.array([1, 2**64 - 1], dtype=np.uint64)}, "counts: want none below 0 or above"),
        ({"counts": np.array([1.0, 2.0])}, "counts: want 1 dimensions and a dtype of kind i or u"),
        ({"words": np.array(["a", "\ud800"])}, "words: want Unicode texts"),
        ({"words": np.frombuffer(b"\xff\xff\xff\xff" * 2, dtype="<U1")}, "words: want Unicode texts"),
    ],
    ids=range(9),
)
def test_arrays_that_do_not_fit_are_named(tmp_path, change, message):
    arrays = {"words": np.array(["a", "b"]), "vectors": np.ones((2, 2)), "counts": np.array([1, 2])}
    np.savez(tmp_path / "x.npz", **arrays | change)
    with pytest.raises(InputError, match=rf"x\.npz: {message}"):
        read_vectors(tmp_path / "x.npz")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a 1\nb -1\n", "line 2: want a count from 0 to 9223372036854775807, got -1"),
        ("a 1\nb 9223372036854775808\n", "line 2: want a count from 0"),
        ("a 9223372036854775807\nb 1\n", "want counts whose sum is at most"),
        ("a 1\nb\n", "want a word and a whole number a line: line 2"),
        ("a 1.5\n", "want a word and a whole number a line: line 1"),
        ("a " + "9" * 5000, "want a word and a whole number a line: line 1"),
    ],
    ids=range(6),
)
def test_counts_that_are_none_are_refused(tmp_path, text, message):
    (tmp_path / "x.txt").write_text(text)
    with pytest.raises(InputError, match=message):
        read_counts(tmp_path / "x.txt")
