"""Safetensors files with a checksum: written atomically, and verified before anything is taken from them.

The file's metadata hold the CRC-32 of the whole file, computed as if its own eight digits were zeros. It
finds every change of up to 32 neighbouring bits, wherever it is. Files of other programs, which have none,
are read too.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fastqt.errors import InputError, one_line
from fastqt.sentences.json_text import Digest
from fastqt.sentences.runs.files import write_atomically

CHECKSUM = "crc32"
UNKNOWN_CHECKSUM = "0" * 8
LONGEST_HEADER = 100_000_000  # bytes, as in the safetensors library
CHUNK = 1 << 20  # bytes


def save_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes tensors by their names atomically, with a checksum and further texts in the metadata."""
    contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    texts = {**(metadata or {}), CHECKSUM: UNKNOWN_CHECKSUM}

    def write(partial: Path) -> None:
        try:
            save_file(contiguous, partial, texts)
        except SafetensorError as error:  # among others, a full disk
            raise OSError(f"cannot write {path}: {error}") from error
        checksum, position, _ = _checksum(partial)
        with partial.open("r+b") as file:
            file.seek(position)
            file.write(checksum.encode())

    write_atomically(path, write)


@contextlib.contextmanager
def open_tensors(path: Path, digest: Digest | None = None, *, verified: bool = False) -> Iterator[Any]:
    """Opens a safetensors file after its checksum was verified; gives what `safetensors.safe_open` gives.

    `verified` says that this process has verified it already, and holds the lock of its directory since.

    The bytes that are read for the checksum go into `digest` too. Errors of reading inside the `with` block
    are InputErrors.
    """
    try:
        if not verified:
            _verify(path, digest)
        with safe_open(path, framework="pt") as file:
            yield file
    except FileNotFoundError:
        raise InputError(f"{path.name} is missing in {path.parent}") from None
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} is damaged: {one_line(error)}") from error


def metadata_of(file: Any) -> dict[str, str]:
    """The metadata of a file that `open_tensors` opened, without the checksum."""
    return {name: text for name, text in (file.metadata() or {}).items() if name != CHECKSUM}


def _verify(path: Path, digest: Digest | None) -> None:
    computed, position, stored = _checksum(path, digest)
    if position >= 0 and computed != stored:
        raise InputError(f"{path} is damaged: its checksum is {computed}, but {stored!r} was stored")


def _checksum(path: Path, digest: Digest | None = None) -> tuple[str, int, str]:
    """A file's checksum as eight hexadecimal digits, where it is stored in the file, and what is there.

    The position is -1 in a file without a checksum, of which none is computed.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > min(size - 8, LONGEST_HEADER):
            raise InputError(
                f"{path} is damaged: want a header of at most {max(min(size - 8, LONGEST_HEADER), 0):,} "
                f"bytes, got {length:,}"
            )

        header = file.read(length)
        if digest is not None:
            digest.update(start + header)
        before, mark, after = header.partition(f'"{CHECKSUM}":"'.encode())
        digits = len(UNKNOWN_CHECKSUM)
        position = len(start) + len(before) + len(mark)
        stored = after[:digits].decode(errors="replace")
        crc = zlib.crc32(start + before + mark + UNKNOWN_CHECKSUM.encode() + after[digits:])
        while chunk := file.read(CHUNK):
            crc = zlib.crc32(chunk, crc)
            if digest is not None:
                digest.update(chunk)
    return (f"{crc:08x}", position, stored) if mark else ("", -1, "")
