"""Pre-trained word vectors, word counts, and arrays of rows."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fastqt.errors import InputError
from fastqt.sentences.evaluation.encoders import WordVectors
from fastqt.sentences.text.vectors import map_rows, read_counts, read_vectors, vectors_of, width_of
from tests.fuzz.files import text_file, write
from tests.fuzz.refusals import check_file_refusal
from tests.fuzz.source import Bytes

DTYPES = ("<f4", "<U3", "<i8", "<f8", "<f2", "|b1", "|O", "|S4", "<c8", "<M8[s]", "|V4", "<u8", ">f4", "<U0")
SIZES = (2, 1, 0, 3, 10**6, 10**9, 10**12, 2**62, -1)


def run_vectors(data: bytes) -> bool:
    source = Bytes(data)
    kind = source.choice(("text", "counts", "array"))
    path = write("rows.npy", any_array(source)) if kind == "array" else text_file(source, "vectors")
    try:
        if kind == "array":
            rows = map_rows(path)
            assert rows.ndim == 2
            assert rows.dtype.kind == "f"
            return bool(len(np.array(rows)))
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
    words, matrix = read_vectors(path)
    _check_matrix(words, matrix)
    assert matrix.shape[1] == width_of(path)
    if words:
        assert vectors_of(path, [words[-1], "absent\n"]).places.tolist() == [0]
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
