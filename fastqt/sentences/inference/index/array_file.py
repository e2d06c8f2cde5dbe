"""One file of large arrays, written in parts and read in place: what is read of it is verified first.

The arrays come first, each from a multiple of 64 bytes on. Then there are the CRC-32 of all their pieces of
64 KiB, a header in JSON, and 20 bytes with the header's length and CRC-32. A reader maps the file and
verifies the pieces that it is asked for, so that opening a file takes no longer if it is large. It is
no safetensors file, which begins with a header and has one checksum at most: the first array is what faiss
reads, and a search of a large index must not read all of it first.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
import zlib
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from fastqt.errors import InputError
from fastqt.sentences.json_text import field, parse_object, to_json

PIECE = 1 << 16  # bytes
ALIGNMENT = 64  # bytes
LONGEST_HEADER = 1 << 26  # bytes
END = struct.Struct("<QI8s")  # the header's length, its CRC-32, and MAGIC
MAGIC = b"fastqt\x00\x01"
DTYPES = {"float32", "int32", "int64", "uint8"}


class ArrayWriter:
    """Writes arrays to a new file, open for writing and reading, one after the other."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._arrays: dict[str, dict[str, Any]] = {}
        self._checksums = array("I")
        self._end: int | None = None  # of the arrays, once a header was written

    def add(self, name: str, dtype: str, shape: tuple[int, ...], parts: Iterable[NDArray[Any]]) -> None:
        """Writes an array of one of DTYPES and of this shape, whose elements come in parts, in order."""
        self._file.write(b"\0" * (-self._file.tell() % ALIGNMENT))
        begin = self._file.tell()
        self._arrays[name] = {"offset": begin, "dtype": dtype, "shape": list(shape)}
        rest = b""
        for part in parts:
            data = rest + np.ascontiguousarray(part, dtype).tobytes()
            whole = len(data) - len(data) % PIECE
            self._write(data[:whole])
            rest = data[whole:]
        self._write(rest)
        written, wanted = self._file.tell() - begin, math.prod(shape) * np.dtype(dtype).itemsize
        if written != wanted:
            raise ValueError(f"{name}: want {wanted} bytes for shape {shape}, got {written}")

    def finish(self, header: dict[str, Any]) -> None:
        """Writes the header, in place of an earlier one if there was one."""
        if self._end is None:
            self._end = self._file.tell()
        self._file.seek(self._end)
        self._file.truncate()
        table = np.array(self._checksums, "<u4").tobytes()
        whole = {**header, "arrays": self._arrays, "checksums": zlib.crc32(table)}
        text = to_json(whole).encode()
        self._file.write(table + text + END.pack(len(text), zlib.crc32(text), MAGIC))
        self._file.flush()

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        for begin in range(0, len(data), PIECE):
            self._checksums.append(zlib.crc32(data[begin : begin + PIECE]))


class StoredArray:
    """An array in a file that is mapped, not read."""

    def __init__(self, path: Path, name: str, values: NDArray[Any], checksums: NDArray[np.uint32]) -> None:
        self._path, self._name, self._values, self._checksums = path, name, values, checksums
        self._bytes = values.reshape(-1).view(np.uint8)
        self._verified = np.zeros(len(checksums), bool)

    def __len__(self) -> int:
        return len(self._values)

    def read(self, begin: int = 0, end: int | None = None) -> NDArray[Any]:
        """The rows begin <= i < end, verified."""
        end = len(self) if end is None else end
        row = self._bytes.size // max(len(self), 1)
        for piece in range(begin * row // PIECE, -(-end * row // PIECE)):
            if not self._verified[piece]:
                data = self._bytes[piece * PIECE : (piece + 1) * PIECE]
                if zlib.crc32(data.data) != self._checksums[piece]:
                    raise InputError(f"{self._path} is damaged: a checksum of {self._name} is another one")
                self._verified[piece] = True
        return self._values[begin:end]


class ArrayFile:
    """Reads a file that `ArrayWriter` wrote, or one that is damaged or made to harm.

    It must stay as it is while it is in use. `header` is what was given to `ArrayWriter.finish`; it is the
    caller's to check.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                self.header = self._header(file, size)
                self._bytes = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        except FileNotFoundError:
            raise InputError(f"no such file: {path}") from None
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror or error}") from error
        if self._bytes.size != size:
            raise InputError(f"{path} is damaged: want {size:,} bytes, got {self._bytes.size:,}")
        self._arrays = self._checked_arrays()

    def array(self, name: str, dtype: str, shape: tuple[int, ...]) -> StoredArray:
        """An array of the file, of this dtype and shape."""
        if name not in self._arrays:
            raise InputError(f"{self.path} is damaged: the array {name} is missing")
        offset, got, extent, first = self._arrays[name]
        if (got, extent) != (dtype, shape):
            raise InputError(
                f"{self.path} is damaged: {name}: want {dtype} of shape {shape}, got {got} of shape {extent}"
            )
        size = math.prod(shape) * np.dtype(dtype).itemsize
        values = self._bytes[offset : offset + size].view(dtype).reshape(shape)
        return StoredArray(self.path, name, values, self._checksums[first : first + -(-size // PIECE)])

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of an array, () if there is none of this name."""
        return self._arrays[name][2] if name in self._arrays else ()

    def offset(self, name: str) -> int:
        """Where in the file an array begins, in bytes."""
        return self._arrays[name][0]

    def _header(self, file: IO[bytes], size: int) -> dict[str, Any]:
        if size < END.size:
            raise InputError(f"{self.path}: want a file that fastqt index wrote, got {size} bytes")
        file.seek(size - END.size)
        length, checksum, magic = END.unpack(file.read(END.size))
        if magic != MAGIC:
            raise InputError(
                f"{self.path}: want a file that fastqt index wrote, got another kind or a part of one"
            )
        self._before_header = size - END.size - length
        if length > LONGEST_HEADER or self._before_header < 0:
            raise InputError(f"{self.path} is damaged: its header cannot have {length:,} bytes")
        file.seek(self._before_header)
        text = file.read(length)
        if zlib.crc32(text) != checksum:
            raise InputError(f"{self.path} is damaged: the checksum of its header is another one")
        return parse_object(text, self.path)

    def _checked_arrays(self) -> dict[str, tuple[int, str, tuple[int, ...], int]]:
        """Offset, dtype, shape and the number of the first piece of each array; sets `_checksums`."""
        arrays: dict[str, tuple[int, str, tuple[int, ...], int]] = {}
        end = pieces = 0
        for name, entry in field(self.header, "arrays", dict, self.path).items():
            if not isinstance(entry, dict):
                raise InputError(f"{self.path} is damaged: arrays: want objects, got another kind")
            offset = field(entry, "offset", int, self.path)
            dtype = field(entry, "dtype", str, self.path)
            shape = tuple(field(entry, "shape", list, self.path))
            sizes_fit = len(shape) in (1, 2) and all(type(n) is int and 0 <= n < 2**48 for n in shape)

            if dtype not in DTYPES or not sizes_fit:
                raise InputError(f"{self.path} is damaged: no dtype and shape of an array that can be stored")
            size = math.prod(shape) * np.dtype(dtype).itemsize
            if offset % ALIGNMENT or offset < end or offset + size > self._before_header:
                raise InputError(f"{self.path} is damaged: arrays: want them one after the other in the file")
            arrays[name] = offset, dtype, shape, pieces
            end, pieces = offset + size, pieces + -(-size // PIECE)

        if end + 4 * pieces != self._before_header:
            raise InputError(f"{self.path} is damaged: want checksums of {pieces:,} pieces after its arrays")
        table = self._bytes[end : self._before_header].tobytes()
        if zlib.crc32(table) != field(self.header, "checksums", int, self.path):
            raise InputError(f"{self.path} is damaged: the checksum of its checksums is another one")
        self._checksums = np.frombuffer(table, "<u4")
        return arrays
