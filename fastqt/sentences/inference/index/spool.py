"""Rows that wait on the disk until it is known how many there are."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Spool:
    """Rows in a file without a name in `folder`, which is gone with the process, however that ends.

    A row has `width` elements of a dtype; with a width of 0, rows are elements.
    """

    def __init__(self, folder: Path, dtype: str, width: int = 0) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  # it stays open as long as this object
        self._dtype, self._tail = np.dtype(dtype), (width,) if width else ()
        self._row = self._dtype.itemsize * (width or 1)
        self.rows = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of all rows together."""
        return (self.rows, *self._tail)

    def append(self, values: NDArray[Any]) -> None:
        """Adds rows at the end."""
        self._file.seek(0, os.SEEK_END)  # a part may have been read
        self._file.write(np.ascontiguousarray(values, self._dtype).data)
        self.rows += len(values)

    def parts(self, rows: int) -> Iterator[NDArray[Any]]:
        """All rows in order, `rows` at a time."""
        for begin in range(0, self.rows, rows):
            size = min(rows, self.rows - begin) * self._row
            yield np.frombuffer(self._read(begin, size), self._dtype).reshape(-1, *self._tail)

    def take(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        """The rows of these numbers, in this order."""
        data = b"".join(self._read(row, self._row) for row in rows.tolist())
        return np.frombuffer(data, self._dtype).reshape(-1, *self._tail)

    def _read(self, row: int, size: int) -> bytes:
        """So many bytes from the first of a row on."""
        self._file.seek(row * self._row)
        return self._file.read(size)

    def close(self) -> None:
        """Gives the disk's space back."""
        self._file.close()
