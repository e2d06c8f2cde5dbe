"""Findings of a run: one input for each place that raised what it should not."""

from __future__ import annotations

import hashlib
import traceback
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]


def signature(error: BaseException) -> str:
    """Where an exception and its causes came from: the type and the innermost line of fastqt of each."""
    parts = []
    while error is not None:
        frames = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in frames if Path(frame.filename).is_relative_to(ROOT / "fastqt")]
        place = (ours or frames)[-1]
        path = Path(place.filename)
        name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name
        parts.append(f"{type(error).__name__} at {name}:{place.lineno}")
        error = error.__cause__  # type: ignore[assignment]
    return " from ".join(parts)


class Findings:
    """Stores the first input of each signature in `folder`, with its traceback, and counts the others."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.counts: Counter[str] = Counter()

    def add(self, data: bytes, error: BaseException) -> None:
        place = signature(error)
        self.counts[place] += 1
        if self.counts[place] > 1:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        name = hashlib.sha256(place.encode()).hexdigest()[:12]
        (self.folder / name).write_bytes(data)
        text = "".join(traceback.format_exception(error))
        (self.folder / f"{name}.txt").write_text(f"{place}\n{text}", encoding="utf-8", errors="replace")
        print(f"finding {name}: {place}", flush=True)
