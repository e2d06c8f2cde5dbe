"""metrics.jsonl, the file that the figures of a training go to."""

from __future__ import annotations

import json
import os
from pathlib import Path

from fastqt.errors import InputError


class MetricsLog:
    """metrics.jsonl: a JSON object a line, appended, and cut back to a known length on resuming."""

    def __init__(self, path: Path, length: int = 0) -> None:
        path.touch()
        self._file = path.open("r+", encoding="utf-8")
        if os.fstat(self._file.fileno()).st_size < length:
            self._file.close()
            raise InputError(f"cannot resume: {path} is shorter than it was at the last checkpoint")
        self._file.truncate(length)
        self._file.seek(length)

    def write(self, line: dict[str, float]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def sync(self) -> int:
        """Brings the lines to the disk; returns how many bytes there are."""
        os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        self._file.close()
