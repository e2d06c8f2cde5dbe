"""Word vectors and counts in every format: what is read, which vector a word takes, and what is refused."""

import gzip
import io
import json
import tracemalloc

import numpy as np
import pytest

from fastqt.errors import InputError
from fastqt.sentences.text import limits
from fastqt.sentences.text.limits import table_lines
from fastqt.sentences.text.vectors import WordRows, parts, read_counts, read_vectors, vectors_of, width_of

WORDS = ["the", "of", "Paris", "paris", "US", ",", "naïve"]
VECTORS = np.random.default_rng(0).normal(size=(7, 4)).astype(np.float32)


def wink(**changes) -> bytes:
    """The JSON of wink's embeddings, where behind each vector are its norm and its number."""
    rows = {word: [*row, 0.5, 1] for word, row in zip(WORDS, VECTORS.tolist(), strict=True)}
    head = {"precision": 8, "l2NormIndex": 4, "wordIndex": 5, "size": len(rows), "dimensions": 4}
    whole = {**head, "words": WORDS, "vectors": rows, "unkVector": [0, 0, 0, 0, 0, -1]} | changes
    fields = {name: value for name, value in whole.items() if value is not None}
    return json.dumps(fields, separators=(",", ":")).encode()


def npz(**change) -> bytes:
    file = io.BytesIO()
    np.savez(file, **{"words": np.array(WORDS), "vectors": VECTORS, "counts": np.arange(7)} | change)
    return file.getvalue()


def mapped(folder, words=WORDS, vectors=VECTORS, **columns):
    """An .npy beside a Parquet file of words, as a wheel has GloVe."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    folder.mkdir(exist_ok=True)
    np.save(folder / "emb.npy", vectors)
    parquet.write_table(pyarrow.table(columns or {"index": words}), folder / "index.parquet")
    return folder


def write(folder, name):
    """The same vectors in each of the formats."""
    if name == "folder":
        return mapped(folder / name)
    lines = (f"{word} {' '.join(map(str, row))}\n" for word, row in zip(WORDS, VECTORS.tolist(), strict=True))
    makers = {"x.npz": npz, "x.txt": lambda: "".join(lines).encode(), "x.json": wink}
    data = makers[name.removesuffix(".gz")]()
    (folder / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return folder / name


@pytest.mark.parametrize("name", ["x.npz", "x.txt", "x.json", "x.json.gz", "folder"])
def test_all_formats_hold_the_same(tmp_path, name):
    path = write(tmp_path, name)
    read = read_vectors(path)
    assert (read.words, width_of(path)) == (WORDS, 4)
    assert read.vectors.dtype == np.float32
    assert np.array_equal(read.vectors, VECTORS)
    assert read.counts is None or read.counts.tolist() == [*range(7)]
    assert (read.counts is None) == (name != "x.npz")
    few = read_vectors(path, {"naïve", "absent", "of"})
    assert few.words == ["of", "naïve"]
    assert np.array_equal(few.vectors, VECTORS[[1, 6]])
    assert few.counts is None or few.counts.tolist() == [1, 6]
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


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.int16])
def test_rows_of_a_mapped_array(tmp_path, order, dtype):
    stored = np.asarray((9 * VECTORS).astype(dtype), order=order)
    folder = mapped(tmp_path / "glove", vectors=stored)
    for path in (folder, folder / "emb.npy"):
        assert parts(path) == [folder / "emb.npy", folder / "index.parquet"]
        words, vectors, _ = read_vectors(path, {"naïve", "of"})
        assert (words, width_of(path)) == (["of", "naïve"], 4)
        assert vectors.dtype == np.float32
        assert np.array_equal(vectors, stored[[1, 6]].astype(np.float32))


def test_wanted_rows_alone_become_memory(tmp_path):
    words = [f"w{number}" for number in range(2000)]
    vectors = np.asfortranarray(np.random.default_rng(0).normal(size=(2000, 1000)).astype(np.float32))
    folder = mapped(tmp_path / "large", words, vectors)
    tracemalloc.start()
    _, found, _ = read_vectors(folder, {"w7", "w1999"})
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert np.array_equal(found, vectors[[7, 1999]])
    assert peak < vectors.nbytes / 4


ROW, TWO = [1, 2, 3, 4, 5, 6], {"words": np.array(["a", "b"]), "counts": np.array([1, 2])}
WINK = [
    ({"dimensions": None}, "want `dimensions`, a number, before `vectors`, got none"),
    ({"dimensions": "4"}, "dimensions: want 1 to 65,536, got '4'"),
    ({"dimensions": 0}, "dimensions: want 1 to 65,536, got 0"),
    ({"dimensions": True}, "dimensions: want 1 to 65,536, got True"),
    ({"dimensions": 7}, "vectors: want 7 numbers for 'the', got 6"),
    ({"size": 3}, "vectors: want 3 as `size` says, got 7"),
    ({"size": [7]}, r"vectors: want \[7\] as `size` says"),
    ({"vectors": None}, "want an object `vectors` with a list of numbers for each word, got none"),
    ({"vectors": {}, "size": 0}, "want an object `vectors` with a list of numbers for each word, got no"),
    ({"vectors": [ROW]}, r"want '{', got '\['"),
    ({"vectors": {"a": ROW, "b": ROW[:5]}}, "vectors: want 6 numbers for 'b', got 5"),
    ({"vectors": {"a": [*ROW[:3], True, 4, 5]}}, "vectors: want a list of numbers for 'a'"),
    ({"vectors": {"a\n": 3}}, r"vectors: want a list of numbers for 'a\\\\n'"),
    ({"vectors": {"a": [1, float("nan"), *ROW[:4]]}, "size": 1}, "vectors: want finite numbers"),
    ({"vectors": {"a": [1, 1e300, *ROW[:4]]}, "size": 1}, "vectors: want finite numbers"),
    ({"vectors": {"a": [1, 10**400, *ROW[:4]]}, "size": 1}, "vectors: want finite numbers, got a larger"),
    ({"vectors": {"\ud800": ROW}}, "want words of Unicode, got half a character"),
    ({"words": "the"}, r"want '\[', got '\"'"),
]
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
    (b"a 1\n\xff 1\n", "x.txt is not UTF-8: line 2"),
]
NPZ = [
    ({"vectors": np.ones((3, 2))}, "vectors: want 2 rows for as many words, got 3"),
    ({"vectors": np.array([[1, np.nan], [1, 1]])}, "vectors: want finite numbers, .* in row 1"),
    ({"vectors": np.full((2, 2), 1e300)}, "vectors: want finite numbers, .* in row 1"),
    ({"counts": np.array([1])}, "counts: want 2 for as many words, got 1"),
    ({"counts": np.array([1, -1])}, "counts: want none below 0"),
    ({"counts": np.array([1, 2**64 - 1], dtype=np.uint64)}, "counts: want none below 0 or above"),
    ({"counts": np.array([1.0, 2.0])}, "counts: want 1 dimensions and a dtype of kind i or u"),
    ({"words": np.array(["a", "\ud800"])}, "words: want Unicode texts"),
    ({"words": np.frombuffer(b"\xff\xff\xff\xff" * 2, dtype="<U1")}, "words: want Unicode texts"),
]
COUNTS = [
    (b"a 1\nb -1\n", "line 2: want a count from 0 to 9223372036854775807, got -1"),
    (b"a 1\nb 9223372036854775808\n", "line 2: want a count from 0"),
    (b"a 9223372036854775807\nb 1\n", "want counts whose sum is at most"),
    (b"a 1\nb\n", "want a word and a whole number a line: line 2"),
    (b"a 1.5\n", "want a word and a whole number a line: line 1"),
    (b"a " + b"9" * 5000, "want a word and a whole number a line: line 1"),
]
TWICE = [("Paris", "paris", "vectors: the word 'paris' occurs twice")]
TWICE += [("precision", "size", "x.json is damaged: the key 'size' occurs twice")]
REFUSED = [
    *(("x.json", wink(**changes), message) for changes, message in WINK),
    *(("x.json", wink().replace(f'"{a}":'.encode(), f'"{b}":'.encode()), message) for a, b, message in TWICE),
    *(("x.txt", data, message) for data, message in TEXT),
    *(("counts", data, message) for data, message in COUNTS),
    *(("x.npz", npz(**{"vectors": np.ones((2, 2)), **TWO, **change}), message) for change, message in NPZ),
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
        ("x.npz", b"PK", "is not an .npz"),
        ("x.json", b'{"vectors": {}}', "want `dimensions`"),
        ("x.json", b'{"size": 5, "size": 6}', "the key 'size' occurs twice"),
        *((name, None, name.replace(".", r"\.")) for name in ("x.npz", "x.txt", "x.json", "x.npy")),
    ],
)
def test_the_width_of_a_damaged_or_absent_file_is_refused(tmp_path, name, data, message):
    if data is not None:
        (tmp_path / name).write_bytes(data)
    for read in (width_of, read_vectors):
        with pytest.raises(InputError, match=message):
            read(tmp_path / name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vectors": VECTORS[:3]}, r"index\.parquet: want 3 words for as many rows of emb\.npy, got 7"),
        ({"vectors": VECTORS[0]}, r"emb\.npy: want 2 dimensions"),
        (
            {"vectors": VECTORS.astype(complex)},
            r"emb\.npy: want 2 dimensions and a dtype of kind f or i or u",
        ),
        ({"vectors": VECTORS[:, :0]}, r"emb\.npy: want a value at least"),
        ({"vectors": np.where(VECTORS[3, 0] == VECTORS, np.nan, VECTORS)}, "vectors: want finite .*in row 4"),
        ({"vectors": np.full((7, 2), 1e300)}, r"emb\.npy: vectors: want finite numbers"),
        ({"number": [1, 2, 3, 4]}, r"index\.parquet: column: want the name of the column of text"),
    ],
    ids=range(7),
)
def test_arrays_beside_words_that_do_not_fit_are_named(tmp_path, change, message):
    folder = mapped(tmp_path / "glove", **change)
    with pytest.raises(InputError, match=message):
        read_vectors(folder)


def test_a_folder_must_hold_one_file_of_each(tmp_path):
    with pytest.raises(InputError, match=r"want one \.npy of vectors in .*, got none"):
        read_vectors(tmp_path)
    folder = mapped(tmp_path / "glove")
    np.save(folder / "other.npy", VECTORS)
    with pytest.raises(InputError, match=r"want one \.npy of vectors in .*, got emb\.npy, other\.npy"):
        width_of(folder)
    assert read_vectors(folder / "other.npy").words == WORDS
    (folder / "index.parquet").unlink()
    for path in (folder / "other.npy", tmp_path / "absent.npy"):
        with pytest.raises(InputError, match=r"\.npy: want one \.parquet of their words in .*, got none"):
            read_vectors(path)


def test_every_cut_of_a_file_is_refused(tmp_path):
    folder = mapped(tmp_path / "glove")
    whole, text = (folder / "emb.npy").read_bytes(), wink()
    for length in range(0, len(whole), 7):
        (folder / "emb.npy").write_bytes(whole[:length])
        with pytest.raises(InputError, match=r"emb\.npy"):
            read_vectors(folder)
    (folder / "emb.npy").write_bytes(whole + b"0")
    with pytest.raises(InputError, match=r"emb\.npy: want 112 bytes"):
        read_vectors(folder)
    for length in range(0, len(text), 5):
        (tmp_path / "x.json").write_bytes(text[:length])
        with pytest.raises(InputError, match=r"x\.json"):
            read_vectors(tmp_path / "x.json")


def test_what_is_larger_than_memory_is_refused(tmp_path, monkeypatch):
    """Also where an .xz file asks for a dictionary of four gigabytes."""
    path = write(tmp_path, "x.json")
    with gzip.open(tmp_path / "x.gz", "w") as file:
        file.write(b"a 1\n" * 1_000_000)
    monkeypatch.setattr(limits, "machine_memory", lambda: 1 << 20)
    with pytest.raises(InputError, match=r"x\.gz: want at most half of this machine's memory, 524,288 bytes"):
        read_vectors(tmp_path / "x.gz")
    monkeypatch.setattr(limits, "machine_memory", lambda: 800)
    with pytest.raises(InputError, match=r"x\.json: vectors: want at most half of this machine's memory"):
        read_vectors(path)
    monkeypatch.setattr(limits, "LONGEST_LINE", 1000)
    with gzip.open(tmp_path / "x.gz", "w") as file:
        file.write(b"a" * 1_000_000)
    with pytest.raises(InputError, match=r"x\.gz: line 1: want less than 1,000 bytes"):
        read_vectors(tmp_path / "x.gz")

    class Greedy(io.BytesIO):
        def readline(self, *_):
            raise MemoryError

    monkeypatch.setattr("fastqt.sentences.text.reader.lzma.open", lambda *_: Greedy())
    with pytest.raises(InputError, match=r"x\.xz: want a file that this machine's memory can decompress"):
        read_vectors("x.xz")
