"""Pre-trained word vectors as text, .npz, JSON and .npy beside a table of their words; word counts."""

from __future__ import annotations

import importlib
import io
import struct
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fastqt.errors import InputError
from fastqt.sentences.evaluation.baselines import WordVectors
from fastqt.sentences.text.vectors import read_counts, read_vectors, vectors_of, width_of
from tests.fuzz.files import folder, json_text, text_file, write
from tests.fuzz.refusals import check_file_refusal
from tests.fuzz.source import Bytes

DTYPES = ("<f4", "<U3", "<i8", "<f8", "<f2", "|b1", "|O", "|S4", "<c8", "<M8[s]", "|V4", "<u8", ">f4", "<U0")
SIZES = (2, 1, 0, 3, 10**6, 10**9, 10**12, 2**62, -1)

WORDS = ["the", ",", "naïve"]
ROWS = {word: [0.5, -1, 2.25, 2.5, number] for number, word in enumerate(WORDS)}
TABLE = {"precision": 8, "size": 3, "dimensions": 3, "words": WORDS, "vectors": ROWS, "unkVector": [0, -1]}


def run_vectors(data: bytes) -> bool:
    source = Bytes(data)
    kind = source.choice(("text", "counts", "npz", "npz bytes"))
    if kind == "npz":
        path = write("vectors.npz", any_archive(source, ("words", "vectors", "counts")))
    elif kind == "npz bytes":
        path = write("vectors.npz", source.rest())
    else:
        path = text_file(source, "vectors")
    try:
        return _read_counts(path) if kind == "counts" else _read_vectors(path)
    except InputError as error:
        check_file_refusal(error, path)
        return False


def _read_counts(path: Path) -> bool:
    counts = read_counts(path)
    assert all(type(word) is str and type(count) is int for word, count in counts.items())
    assert all(count >= 0 for count in counts.values()), "a negative frequency"
    return True


def _read_vectors(path: Path) -> bool:
    words, matrix, counts = read_vectors(path)
    _check_matrix(words, matrix)
    if counts is not None:
        assert counts.dtype == np.int64
        assert counts.shape == (len(words),)
        assert (counts >= 0).all(), "a negative frequency"
    encode = WordVectors.load(path)
    assert encode(["one two", " ".join(words[:3]) or "x"]).shape == (2, matrix.shape[1])
    return True


def _check_matrix(words: Sequence[str], matrix: np.ndarray) -> None:
    assert matrix.dtype == np.float32
    assert matrix.ndim == 2
    assert len(matrix) == len(words)
    assert matrix.shape[1] >= 1, "vectors of no columns"
    assert np.isfinite(matrix).all(), "NaN or infinity"
    assert all(type(word) is str and word.encode() is not None for word in words)


def any_archive(source: Bytes, names: Sequence[str]) -> bytes:
    """An .npz of some of these arrays, with any header and payload."""
    file = io.BytesIO()
    compression = source.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name in names[: source.integer(1, len(names))]:
            archive.writestr(f"{name}.npy", any_array(source))
    damaged = bytearray(file.getvalue())
    if source.integer(0, 3) == 3:
        damaged[source.integer(0, 65535) % len(damaged)] ^= source.integer(1, 255)
    return bytes(damaged)


def any_array(source: Bytes) -> bytes:
    if source.integer(0, 7) == 7:
        return source.take(source.integer(0, 255))
    shape = tuple(source.choice(SIZES) for _ in range(source.integer(0, 3)))
    dtype = source.choice(DTYPES)
    header = repr({"descr": dtype, "fortran_order": source.flag(), "shape": shape})
    if source.integer(0, 7) == 7:
        header = source.take(source.integer(0, 127)).decode("latin1")
    text = header.encode("latin1").ljust(117) + b"\n"
    payload = source.take(source.integer(0, 255))
    fill = source.integer(0, 1) * 4096
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + payload.ljust(fill, b"\0")


def run_word_vectors(data: bytes) -> bool:
    source = Bytes(data)
    if source.choice(("json", "npy")) == "json":
        path = write("vectors.json", json_text(source, TABLE))
    else:
        path = index().with_name("vectors.npy")
        path.write_bytes(any_array(source))

    try:
        words, matrix, counts = read_vectors(path)
    except InputError as error:
        check_file_refusal(error, path, index())
        return False

    _check_matrix(words, matrix)
    assert matrix.shape[1] == width_of(path)
    assert counts is None

    rows = vectors_of(path, [words[-1], "absent\n"])
    assert rows.places.tolist() == [0]
    assert np.array_equal(rows.vectors[0], matrix[words.index(words[-1])])
    return True


def index() -> Path:
    """A table of words in a folder of its own, which is written once."""
    path = folder() / "array" / "index.parquet"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        arrow, parquet = (importlib.import_module(name) for name in ("pyarrow", "pyarrow.parquet"))
        parquet.write_table(arrow.table({"index": WORDS}), path)
    return path
