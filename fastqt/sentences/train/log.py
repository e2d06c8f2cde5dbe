"""The log of a training's metrics."""

from __future__ import annotations

import os
from pathlib import Path

from fastqt.errors import InputError
from fastqt.sentences.json_text import to_json


class MetricsLog:
    """Appends to metrics.jsonl, one JSON object per line.

    A training that was killed may have written lines after its last checkpoint. The resumed training computes
    these steps again, so the file is first cut back to `length`, its bytes at the checkpoint; a shorter one
    is refused.
    """

    def __init__(self, path: Path, length: int = 0) -> None:
        path.touch()
        self._file = path.open("r+", encoding="utf-8")
        try:
            if os.fstat(self._file.fileno()).st_size < length:
                raise InputError(f"cannot resume: {path} is shorter than it was at the last checkpoint")
            self._file.truncate(length)
            self._file.seek(length)
        except BaseException:
            self._file.close()
            raise

    def write(self, line: dict[str, float]) -> None:
        """Appends one line and hands it to the operating system; what is NaN or infinite is null there."""
        self._file.write(to_json(line) + "\n")
        self._file.flush()

    def sync(self) -> int:
        """Flushes all lines to the disk. Returns the length of the file in bytes."""
        os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
