"""Damaged and malicious .npz files are refused in words, before memory is taken for them."""

import io
import json
import pickle
import random
import struct
import tracemalloc
import zipfile

import numpy as np
import pytest

from fastqt.errors import InputError
from fastqt.sentences.text import limits
from fastqt.sentences.text.npz import Wanted, read_npz

WANTED = {"words": Wanted("U", 1), "vectors": Wanted("fiu", 2), "counts": Wanted("iu", 1, optional=True)}


def npy(header, data=b""):
    """The bytes of an .npy file with this text as its header."""
    text = header.encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data


def archive(path, compression=zipfile.ZIP_DEFLATED, **members):
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, data in members.items():
            file.writestr(f"{name}.npy", data)
    return path


def array(value):
    file = io.BytesIO()
    np.save(file, value)
    return file.getvalue()


WORDS, VECTORS = np.array(["a", "bc"]), np.arange(6.0).reshape(2, 3)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["<f4", ">f8", "f2", "i4"])
def test_arrays_are_read_as_numpy_reads_them(tmp_path, save, order, dtype):
    arrays = {"words": WORDS, "vectors": VECTORS.astype(dtype, order=order), "other": np.array([None])}
    save(tmp_path / "x.npz", **arrays)
    found = read_npz(tmp_path / "x.npz", WANTED)
    assert found.keys() == {"words", "vectors"}
    for name, value in found.items():
        np.testing.assert_array_equal(value, arrays[name])
        assert value.dtype == arrays[name].dtype


class Evil:
    def __reduce__(self):
        return (pytest.fail, ("code in a file was executed",))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (None, "words is missing"),
        (array(VECTORS), r"words: want 1 dimensions and a dtype of kind U, got shape \(2, 3\) and float64"),
        (array(np.array(["a", None], dtype=object)), "words: want 1 dimensions and a dtype of kind U"),
        (array(np.zeros(2, dtype=[("a", "U3")])), "words: want 1 dimensions and a dtype of kind U"),
        (array(np.array([], dtype="U1")), "words: want a value at least"),
        (npy("{'descr': '<U0', 'fortran_order': False, 'shape': (1000000000000,)}"), "want a value at least"),
        (npy("{'descr': '<U9', 'fortran_order': False, 'shape': (-2,)}"), "words: want a value at least"),
        (
            npy("{'descr': '<U9', 'fortran_order': False, 'shape': (1000000000000,)}", b"1234"),
            "words: want 36,000,000,000,000 bytes for shape .* got 4",
        ),
        (npy("{'descr': '<U500000000', 'fortran_order': False, 'shape': (9,)}"), "bytes for shape"),
        (npy("{'descr': '|O', 'fortran_order': False, 'shape': (2,)}", pickle.dumps(Evil())), "of kind U"),
        (npy("__import__('os').abort()"), "damaged header"),
        (npy("{'descr': " + "(" * 5000), "damaged header"),
        (npy("{'a': 1}"), "damaged header"),
        (npy("{" + "'a': 1," * 9000 + "}"), "damaged header"),
        (npy("\x00"), "damaged header"),
        (npy("'''"), "damaged header"),
        (b"\x93NUMPY\x09\x00", "damaged header"),
        (b"", "damaged header"),
    ],
    ids=range(18),
)
def test_what_is_no_array_of_the_wanted_kind_is_refused(tmp_path, words, message):
    members = {"vectors": array(VECTORS)} | ({} if words is None else {"words": words})
    with pytest.raises(InputError, match=rf"x\.npz.*{message}"):
        read_npz(archive(tmp_path / "x.npz", **members), WANTED)


def test_a_bomb_takes_no_memory(tmp_path, monkeypatch):
    """A gigabyte of zeros is a megabyte when it is compressed; here the memory is said to be small."""
    size = 1 << 26
    header = npy(f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({size // 4}, 1)}}", bytes(size))
    path = archive(tmp_path / "x.npz", words=array(WORDS), vectors=header)
    assert path.stat().st_size < 1 << 20
    monkeypatch.setattr(limits, "machine_memory", lambda: 1 << 20)
    tracemalloc.start()
    try:
        with pytest.raises(
            InputError, match=r"vectors: want at most half of this machine's memory, 524,288 bytes"
        ):
            read_npz(path, WANTED)
        assert tracemalloc.get_traced_memory()[1] < 1 << 22
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("declared", [1 << 40, 200])
def test_a_declared_size_that_is_a_lie_is_refused(tmp_path, declared):
    path = archive(tmp_path / "x.npz", words=array(WORDS), vectors=array(VECTORS))
    data = path.read_bytes()
    true = struct.pack("<I", len(array(VECTORS)))
    path.write_bytes(data.replace(true, struct.pack("<I", min(declared, 2**32 - 2))))
    with pytest.raises(InputError, match=r"x\.npz"):
        read_npz(path, WANTED)


@pytest.mark.parametrize("compression", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_other_compressions_are_refused(tmp_path, compression):
    path = archive(tmp_path / "x.npz", compression, words=array(WORDS), vectors=array(VECTORS))
    with pytest.raises(InputError, match=r"words: want it as numpy\.savez writes it"):
        read_npz(path, WANTED)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_damage_is_refused_or_changes_nothing(tmp_path, save):
    path = tmp_path / "x.npz"
    save(path, words=WORDS, vectors=VECTORS)
    whole, generator = path.read_bytes(), random.Random(0)
    refused = 0
    for number in range(600):
        data = bytearray(whole)
        for _ in range(1 + number % 3):
            data[generator.randrange(len(data))] = generator.choice((0, 255, generator.randrange(256)))
        path.write_bytes(data[: generator.randrange(len(data))] if number % 5 == 0 else data)
        try:
            found = read_npz(path, WANTED)
        except InputError:
            refused += 1
            continue
        np.testing.assert_array_equal(found["words"], WORDS)
        np.testing.assert_array_equal(found["vectors"], VECTORS)
    assert refused > 200


def test_other_files_are_refused(tmp_path):
    with pytest.raises(InputError, match="no such file: none"):
        read_npz("none", WANTED)
    for data in (b"", b"PK", json.dumps([1]).encode(), array(VECTORS)):
        (tmp_path / "x.npz").write_bytes(data)
        with pytest.raises(InputError, match=r"x\.npz is not an \.npz, or is damaged"):
            read_npz(tmp_path / "x.npz", WANTED)
    with pytest.raises(InputError, match=r"is not an \.npz, or is damaged: .*Is a directory"):
        read_npz(tmp_path, WANTED)
