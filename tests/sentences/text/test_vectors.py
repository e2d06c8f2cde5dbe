"""Word vectors and counts: what is read, which vector a word takes, and what is refused."""

import gzip
import io

import numpy as np
import pytest

from fastqt.errors import InputError
from fastqt.sentences.text import reader
from fastqt.sentences.text.reader import table_lines
from fastqt.sentences.text.vectors import WordRows, read_counts, read_vectors, vectors_of, width_of
from tests.shared.word_vectors import write_vectors

WORDS = ["the", "of", "Paris", "paris", "US", ",", "naïve"]
VECTORS = np.random.default_rng(0).normal(size=(7, 4)).astype(np.float32)


def write(folder, name):
    path = write_vectors(folder / name, WORDS, VECTORS)
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(path.read_bytes()))
    return path


@pytest.mark.parametrize("name", ["x.txt", "x.txt.gz"])
def test_words_and_vectors_are_read(tmp_path, name):
    path = write(tmp_path, name)
    read = read_vectors(path)
    assert (read.words, width_of(path)) == (WORDS, 4)
    assert read.vectors.dtype == np.float32
    assert np.array_equal(read.vectors, VECTORS)
    few = read_vectors(path, {"naïve", "absent", "of"})
    assert few.words == ["of", "naïve"]
    assert np.array_equal(few.vectors, VECTORS[[1, 6]])
    assert read_vectors(path, set()).vectors.shape == (0, 4)
    # A word takes its own vector, or that of its lower-case form; "us" has none, as "US" is another word.
    found = vectors_of(path, ["The", "PARIS", "Paris", "us", "absent", "of", "The"])
    assert found.places.tolist() == [0, 1, 2, 5, 6]
    assert np.array_equal(found.vectors, VECTORS[[0, 3, 2, 1, 0]])
    assert vectors_of(path, ["absent"]).vectors.shape == (0, 4)


def test_of_a_word_that_occurs_twice_the_first_row_counts():
    rows = WordRows(["a", "b", "a"])
    assert [rows.find(word) for word in ("a", "A", "b", "c")] == [0, 0, 1, -1]


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


def test_lines_are_read_as_they_are_and_two_numbers_may_be_no_header(tmp_path):
    path = tmp_path / "x.txt"
    for text in (" a \nb\t\n\n\u00a0c", " a \nb\t\n\n\u00a0c\n\n\n"):
        path.write_text(text)
        assert list(table_lines(path)) == [" a ", "b\t", "", "\u00a0c"]
    path.write_text("5 7\na 3\n")
    assert read_vectors(path).words == ["5", "a"]


TEXT = [
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
    (b"a 1\n\xff 1\n", "x.txt: line 2 is not UTF-8"),
]
COUNTS = [
    (b"a 1\nb -1\n", "line 2: want a count from 0 to 9223372036854775807, got -1"),
    (b"a 1\nb 9223372036854775808\n", "line 2: want a count from 0"),
    (b"a 9223372036854775807\nb 1\n", "want counts whose sum is at most"),
    (b"a 1\nb\n", "want a word and a whole number a line: line 2"),
    (b"a 1.5\n", "want a word and a whole number a line: line 1"),
    (b"a " + b"9" * 5000, "want a word and a whole number a line: line 1"),
]
REFUSED = [
    *(("x.txt", data, message) for data, message in TEXT),
    *(("counts", data, message) for data, message in COUNTS),
]


@pytest.mark.parametrize(("name", "data", "message"), REFUSED, ids=range(len(REFUSED)))
def test_what_holds_no_vectors_or_counts_is_refused(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(InputError, match=message) as caught:
        (read_counts if name == "counts" else read_vectors)(tmp_path / name)
    assert name in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("x.txt", b"the\n", "line 1 has 0"),
        ("x.txt", b"", "is empty"),
        ("x.txt", None, r"x\.txt"),
    ],
)
def test_the_width_of_a_damaged_or_absent_file_is_refused(tmp_path, name, data, message):
    if data is not None:
        (tmp_path / name).write_bytes(data)
    for read in (width_of, read_vectors):
        with pytest.raises(InputError, match=message):
            read(tmp_path / name)


def test_what_is_larger_than_memory_is_refused(tmp_path, monkeypatch):
    """Also where an .xz file asks for a dictionary of four gigabytes."""
    with gzip.open(tmp_path / "x.gz", "w") as file:
        file.write(b"a 1\n" * 1_000_000)
    monkeypatch.setattr(reader, "machine_memory", lambda: 1 << 20)
    with pytest.raises(InputError, match=r"x\.gz: want at most half of this machine's memory, 524,288 bytes"):
        read_vectors(tmp_path / "x.gz")
    monkeypatch.setattr(reader, "LONGEST_OF_TABLE", 1000)
    with gzip.open(tmp_path / "x.gz", "w") as file:
        file.write(b"a" * 1_000_000)
    with pytest.raises(InputError, match=r"x\.gz: line 1: want at most 1,000 bytes"):
        read_vectors(tmp_path / "x.gz")

    class Greedy(io.BytesIO):
        def readline(self, *_):
            raise MemoryError

    monkeypatch.setattr("fastqt.sentences.text.reader.lzma.open", lambda *_: Greedy())
    with pytest.raises(InputError, match=r"x\.xz: want a file that this machine's memory can decompress"):
        read_vectors("x.xz")
