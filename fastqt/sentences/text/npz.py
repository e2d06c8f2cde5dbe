"""Reads .npz and .npy files that may be damaged or made to harm: sizes are checked before memory is taken."""

from __future__ import annotations

import contextlib
import math
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from fastqt.errors import InputError, one_line
from fastqt.sentences.text.limits import check_bytes

ENCRYPTED = 1  # a flag of the members of zip files
READ_BYTES = 1 << 24


class Wanted(NamedTuple):
    """What an array must be."""

    kinds: str  # the letters of the allowed dtypes, as in numpy.dtype.kind
    ndim: int
    optional: bool = False


class Header(NamedTuple):
    """What the header of an array says."""

    shape: tuple[int, ...]
    fortran_order: bool
    dtype: np.dtype[Any]


def read_npz(path: str | Path, wanted: Mapping[str, Wanted]) -> dict[str, NDArray[Any]]:
    """Reads the wanted arrays from an .npz file; nothing in it is ever executed.

    Those that are optional and absent are left out; those that are larger than memory or of another kind are
    refused.
    """
    with _opened(path) as archive:
        return dict(_arrays(archive, path, wanted, _read_array))


def npz_header(path: str | Path, name: str, wanted: Wanted) -> Header:
    """Reads the header of one array in an .npz file, for its shape. For the errors see `read_npz`."""
    with _opened(path) as archive:
        header: Header = dict(_arrays(archive, path, {name: wanted}, read_header))[name]
        return header


@contextlib.contextmanager
def _opened(path: str | Path) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except InputError:
        raise
    except FileNotFoundError:
        raise InputError(f"no such file: {path}") from None
    # What Python's zip reader raises for damaged files, one kind for each thing that it does not expect.
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, NotImplementedError) as error:
        raise InputError(f"{path} is not an .npz, or is damaged: {one_line(error)}") from error


def read_npy(path: str | Path, wanted: Wanted) -> NDArray[Any]:
    """Reads the array of an .npy file, as `read_npz` does."""
    try:
        with Path(path).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            check_bytes(size, str(path))
            return _read_array(file, size, wanted, str(path))
    except FileNotFoundError:
        raise InputError(f"no such file: {path}") from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error


def map_npy(path: str | Path, wanted: Wanted) -> NDArray[Any]:
    """Maps the array of an .npy file into memory, if the file is whole: rows are read when they are used."""
    try:
        with Path(path).open("rb") as file:
            header = read_header(file, os.fstat(file.fileno()).st_size, wanted, str(path))
            begin = file.tell()
        return np.memmap(path, header.dtype, "r", begin, header.shape, "F" if header.fortran_order else "C")
    except FileNotFoundError:
        raise InputError(f"no such file: {path}") from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error


def _arrays(
    archive: zipfile.ZipFile, path: str | Path, wanted: Mapping[str, Wanted], read: Callable[..., Any]
) -> Iterator[tuple[str, Any]]:
    members = {info.filename: info for info in archive.infolist()}
    for name, kind in wanted.items():
        info = members.get(f"{name}.npy")
        if info is None:
            if kind.optional:
                continue
            names = " and ".join(f"`{each}`" for each, other in wanted.items() if not other.optional)
            raise InputError(f"{path} is not an .npz with {names}: {name} is missing")
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or info.flag_bits & ENCRYPTED:
            raise InputError(f"{path}: {name}: want it as numpy.savez writes it")
        check_bytes(info.file_size, f"{path}: {name}")
        with archive.open(info) as file:
            yield name, read(file, info.file_size, kind, f"{path}: {name}")


def _read_array(file: IO[bytes], size: int, wanted: Wanted, name: str) -> NDArray[Any]:
    """Reads an array whose header and data take `size` bytes."""
    shape, fortran_order, dtype = read_header(file, size, wanted, name)
    needed = math.prod(shape) * dtype.itemsize
    data = bytearray(needed)
    view, filled = memoryview(data), 0
    while filled < needed:
        part = file.read(min(READ_BYTES, needed - filled))
        if not part:
            raise InputError(f"{name}: want {needed:,} bytes, got {filled:,}")
        view[filled : filled + len(part)] = part
        filled += len(part)
    file.read(1)  # at the end of a member, its checksum is compared
    array: NDArray[Any] = np.ndarray(shape, dtype, buffer=data, order="F" if fortran_order else "C")
    return array


def read_header(file: IO[bytes], size: int, wanted: Wanted, name: str) -> Header:
    """Reads the header of an array and checks that its data have the size that it says.

    `file` is what numpy.save wrote; it is read up to the data. Header and data take `size` bytes.
    """
    shape, fortran_order, dtype = _read_header(file, name)
    if dtype.kind not in wanted.kinds or len(shape) != wanted.ndim:
        raise InputError(
            f"{name}: want {wanted.ndim} dimensions and a dtype of kind {' or '.join(wanted.kinds)}, "
            f"got shape {shape!s:.100} and {dtype!s:.100}"
        )
    if min(shape) < 1 or dtype.itemsize == 0:
        raise InputError(f"{name}: want a value at least, got shape {shape!s:.100} of {dtype!s:.100}")
    needed, stored = math.prod(shape) * dtype.itemsize, size - file.tell()
    if needed != stored:
        raise InputError(f"{name}: want {needed:,} bytes for shape {shape!s:.100} of {dtype}, got {stored:,}")
    return Header(shape, fortran_order, dtype)


def _read_header(file: IO[bytes], name: str) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    try:
        version = npy.read_magic(file)
        if version not in readers:
            raise ValueError(f"version {version}")
        return readers[version](file)
    # numpy's parser of headers raises whatever Python's own parser and tokenizer do.
    except Exception as error:
        raise InputError(
            f"{name}: want an array of numpy's format, got a damaged header: {one_line(error)}"
        ) from error
