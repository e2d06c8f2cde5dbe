"""How much may be read: a small compressed file can hold more than any memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import IO

from fastqt.devices import machine_memory
from fastqt.errors import InputError
from fastqt.sentences.text.reader import BOM, open_text

LONGEST_LINE = 1 << 24  # bytes


def check_bytes(size: int, name: str) -> None:
    """Refuses what would take more than half of this machine's memory; `name` says what it is."""
    if size > (most := machine_memory() // 2):
        raise InputError(f"{name}: want at most half of this machine's memory, {most:,} bytes, got {size:,}")


def table_lines(path: str | Path) -> Iterator[str]:
    """Streams the lines of a text file, without the line break and without blank lines at its end.

    A line break is a line feed, or a carriage return with one; a byte order mark at the beginning is no text.
    The file may be compressed as .gz or .xz. An empty file is refused, and one that is larger than memory.
    """
    with open_text(str(path)) as file:
        yield from _lines(file, path)


def _lines(file: IO[bytes], path: str | Path) -> Iterator[str]:
    number = blank = total = 0
    while line := file.readline(LONGEST_LINE):
        number, total = number + 1, total + len(line)
        if len(line) == LONGEST_LINE:
            raise InputError(f"{path}: line {number}: want less than {LONGEST_LINE:,} bytes")
        check_bytes(total, str(path))

        try:
            text = (
                line.removeprefix(BOM if number == 1 else b"").decode().removesuffix("\n").removesuffix("\r")
            )
        except UnicodeDecodeError as error:
            raise InputError(f"{path} is not UTF-8: line {number}: {error}") from None

        if not text:
            blank += 1
            continue
        yield from [""] * blank
        blank = 0
        yield text
    if number == blank:
        raise InputError(f"{path} is empty")
