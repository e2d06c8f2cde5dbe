"""The log of a training's metrics."""

from __future__ import annotations

import os
from pathlib import Path

from fastqt.sentences.errors import warn
from fastqt.sentences.json_text import to_json


class MetricsLog:
    """Appends to metrics.jsonl, one JSON object per line.

    A training that was killed may have written lines after its last checkpoint. The resumed training computes
    these steps again, so the file is first cut back to `length`, its bytes at the checkpoint.

    Metrics only tell of a training, and never end it: where the file cannot be written, or has become shorter
    than `length`, a warning says so. Lines that could not be written are written with the next ones.
    """

    def __init__(self, path: Path, length: int = 0) -> None:
        self._path, self._length = path, length
        self._unwritten = b""
        self._fails = False
        self._append()

    def write(self, line: dict[str, float]) -> None:
        """Appends one line and hands it to the operating system; what is NaN or infinite is null there."""
        self._unwritten += to_json(line).encode() + b"\n"
        self._append()

    def sync(self) -> int:
        """Flushes all lines to the disk. Returns the length of the file in bytes, once all are written."""
        self._append(sync=True)
        return self._length + len(self._unwritten)

    def close(self) -> None:
        """Writes the lines that could not be written before, if there are any."""
        if self._unwritten:
            self._append()

    def _append(self, *, sync: bool = False) -> None:
        try:
            with self._path.open("ab") as file:
                size = os.fstat(file.fileno()).st_size
                if size < self._length:
                    warn(f"{self._path} has lost lines: it has {size:,} bytes of {self._length:,}")
                    self._length = size
                    self._unwritten = b"\n" + self._unwritten  # a part of a line may be the last one
                file.truncate(self._length)
                file.write(self._unwritten)
                file.flush()
                if sync:
                    os.fsync(file.fileno())
        except OSError as error:
            if not self._fails:
                warn(f"{self._path} cannot be written: {error.strerror or error}; the training goes on")
            self._fails = True
            return

        self._length += len(self._unwritten)
        self._unwritten = b""
        self._fails = False
