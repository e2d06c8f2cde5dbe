"""A word takes its own vector, or else that of its lower-case form, in every format of file."""

import json

import numpy as np
import pytest

from fastqt.errors import InputError
from fastqt.sentences.text.vectors import WordRows, read_vectors, vectors_of, width_of

WORDS = ["the", "of", "Paris", "paris", "US"]
VECTORS = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
FORMATS = ["npz", "txt", "json", "folder"]


def write(folder, kind):
    """The same vectors in each of the formats."""
    if kind == "npz":
        np.savez(folder / "x.npz", words=np.array(WORDS), vectors=VECTORS, counts=np.arange(5))
    elif kind == "txt":
        lines = (
            f"{word} {' '.join(map(repr, row.tolist()))}\n" for word, row in zip(WORDS, VECTORS, strict=True)
        )
        (folder / "x.txt").write_text("".join(lines))
    elif kind == "json":
        rows = dict(zip(WORDS, VECTORS.tolist(), strict=True))
        (folder / "x.json").write_text(json.dumps({"dimensions": 4, "vectors": rows}))
    else:
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        np.save(folder / "emb.npy", VECTORS)
        parquet.write_table(pyarrow.table({"index": WORDS}), folder / "index.parquet")
        return folder
    return folder / f"x.{kind}"


@pytest.mark.parametrize("kind", FORMATS)
def test_a_word_takes_its_own_vector_or_that_in_lower_case(tmp_path, kind):
    path = write(tmp_path, kind)
    asked = ["The", "PARIS", "Paris", "us", "absent", "of", "The"]
    found = vectors_of(path, asked)
    # By hand: "us" has no vector, because "US" is another word; "Paris" has one of its own.
    assert found.places.tolist() == [0, 1, 2, 5, 6]
    assert np.array_equal(found.vectors, VECTORS[[0, 3, 2, 1, 0]])
    assert found.vectors.dtype == np.float32
    assert vectors_of(path, ["absent"]).vectors.shape == (0, 4)
    assert width_of(path) == 4
    assert read_vectors(path).words == WORDS
    assert np.array_equal(read_vectors(path).vectors, VECTORS)


def test_of_a_word_that_occurs_twice_the_first_row_counts():
    rows = WordRows(["a", "b", "a"])
    assert [rows.find(word) for word in ("a", "A", "b", "c")] == [0, 0, 1, -1]


def test_counts_are_those_of_the_wanted_words(tmp_path):
    words, vectors, counts = read_vectors(write(tmp_path, "npz"), {"of", "US"})
    assert words == ["of", "US"]
    assert np.array_equal(vectors, VECTORS[[1, 4]])
    assert counts.tolist() == [1, 4]


@pytest.mark.parametrize("name", ["x.npz", "x.txt", "x.json", "x.npy"])
def test_an_absent_file_is_named(tmp_path, name):
    for read in (read_vectors, width_of):
        with pytest.raises(InputError, match=name.replace(".", r"\.")):
            read(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("x.txt", b"the\n", "line 1 has 0"),
        ("x.txt", b"the one\n", "line 1 has 0"),
        ("x.txt", b"", "is empty"),
        ("x.npz", b"PK", "is not an .npz"),
        ("x.json", b'{"vectors": {}}', "want `dimensions`"),
    ],
)
def test_the_width_of_a_damaged_file_is_refused(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(InputError, match=message):
        width_of(tmp_path / name)


def test_standard_input_is_refused_because_the_vectors_are_read_once_more():
    with pytest.raises(InputError, match=r"vectors: want files that can be read more .* got standard input"):
        width_of("-")
