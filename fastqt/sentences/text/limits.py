"""How much may be read: a small compressed file can hold more than any memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fastqt.devices import machine_memory
from fastqt.errors import InputError
from fastqt.sentences.text.reader import numbered_lines

LONGEST_LINE = 1 << 24  # bytes


def check_bytes(size: int, name: str) -> None:
    """Refuses what would take more than half of this machine's memory; `name` says what it is."""
    if size > (most := machine_memory() // 2):
        raise InputError(f"{name}: want at most half of this machine's memory, {most:,} bytes, got {size:,}")


def table_lines(path: str | Path) -> Iterator[str]:
    """Streams the lines of a text file, as of `numbered_lines`, without blank lines at its end.

    The file may be compressed as .gz or .xz. An empty file is refused, and one that is larger than memory.
    """
    blank = total = 0
    some = False
    for _, text in numbered_lines(str(path), LONGEST_LINE):
        check_bytes(total := total + len(text), str(path))
        if not text:
            blank += 1
            continue
        yield from [""] * blank
        blank, some = 0, True
        yield text
    if not some:
        raise InputError(f"{path} is empty")
