"""Word vectors as an .npy beside a Parquet file of words, as a wheel has GloVe."""

import tracemalloc

import numpy as np
import pytest

from fastqt.errors import InputError
from fastqt.sentences.text.vectors import parts, read_vectors, width_of

pyarrow = pytest.importorskip("pyarrow")

WORDS = ["the", ",", "naïve", "of"]
VECTORS = np.arange(12, dtype=np.float32).reshape(4, 3) - 5.5


def write(folder, words=WORDS, vectors=VECTORS, **columns):
    from pyarrow import parquet

    folder.mkdir(exist_ok=True)
    np.save(folder / "emb.npy", vectors)
    parquet.write_table(pyarrow.table(columns or {"index": words}), folder / "index.parquet")
    return folder


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int16])
def test_rows_are_those_of_the_words(tmp_path, order, dtype):
    stored = np.asarray(VECTORS.astype(dtype), order=order)
    folder = write(tmp_path / "glove", vectors=stored)
    for path in (folder, folder / "emb.npy"):
        words, vectors, counts = read_vectors(path)
        assert words == WORDS
        assert vectors.dtype == np.float32
        assert np.array_equal(vectors, stored.astype(np.float32))
        assert counts is None
        assert width_of(path) == 3
        assert parts(path) == [folder / "emb.npy", folder / "index.parquet"]
        words, vectors, _ = read_vectors(path, {"of", ",", "absent"})
        assert words == [",", "of"]
        assert np.array_equal(vectors, stored[[1, 3]].astype(np.float32))


def test_wanted_rows_alone_become_memory(tmp_path):
    V, W = 2000, 1000
    words = [f"w{number}" for number in range(V)]
    vectors = np.asfortranarray(np.random.default_rng(0).normal(size=(V, W)).astype(np.float32))
    folder = write(tmp_path / "large", words, vectors)
    tracemalloc.start()
    _, found, _ = read_vectors(folder, {"w7", "w1999"})
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert np.array_equal(found, vectors[[7, 1999]])
    assert peak < vectors.nbytes / 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vectors": VECTORS[:3]}, r"index\.parquet: want 3 words for as many rows of emb\.npy, got 4"),
        ({"vectors": VECTORS[0]}, r"emb\.npy: want 2 dimensions"),
        (
            {"vectors": VECTORS.astype(complex)},
            r"emb\.npy: want 2 dimensions and a dtype of kind f or i or u",
        ),
        ({"vectors": VECTORS[:, :0]}, r"emb\.npy: want a value at least"),
        ({"vectors": np.where(VECTORS > 5, np.nan, VECTORS)}, r"emb\.npy: vectors: want finite .*in row 4"),
        ({"vectors": np.full((4, 2), 1e300)}, r"emb\.npy: vectors: want finite numbers"),
        ({"number": [1, 2, 3, 4]}, r"index\.parquet: column: want the name of the column of text"),
    ],
    ids=range(7),
)
def test_what_does_not_fit_is_named(tmp_path, change, message):
    folder = write(tmp_path / "glove", **change)
    with pytest.raises(InputError, match=message):
        read_vectors(folder)


def test_a_folder_must_hold_one_file_of_each(tmp_path):
    with pytest.raises(InputError, match=r"want one \.npy of vectors in .*, got none"):
        read_vectors(tmp_path)
    folder = write(tmp_path / "glove")
    np.save(folder / "other.npy", VECTORS)
    with pytest.raises(InputError, match=r"want one \.npy of vectors in .*, got emb\.npy, other\.npy"):
        width_of(folder)
    assert len(read_vectors(folder / "other.npy").words) == 4
    (folder / "index.parquet").unlink()
    with pytest.raises(InputError, match=r"other\.npy: want one \.parquet of their words in .*, got none"):
        read_vectors(folder / "other.npy")
    with pytest.raises(InputError, match=r"want one \.parquet"):
        read_vectors(tmp_path / "absent.npy")


def test_every_cut_of_the_array_is_refused(tmp_path):
    folder = write(tmp_path / "glove")
    whole = (folder / "emb.npy").read_bytes()
    for length in range(0, len(whole), 7):
        (folder / "emb.npy").write_bytes(whole[:length])
        with pytest.raises(InputError, match=r"emb\.npy"):
            read_vectors(folder)
    (folder / "emb.npy").write_bytes(whole + b"0")
    with pytest.raises(InputError, match=r"emb\.npy: want 48 bytes"):
        read_vectors(folder)
