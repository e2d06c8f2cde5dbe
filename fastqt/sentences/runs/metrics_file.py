"""metrics.jsonl: how its lines are read and written, which figures they show, and which one is best."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from fastqt.errors import InputError
from fastqt.sentences.errors import warn
from fastqt.sentences.json_text import has_type, null_is_nan, parse_object, to_json
from fastqt.sentences.runs.config import DEV_MEASURE

LARGEST_FIGURE = 1 << 63  # integers beyond it are damage, and may be too long for a float
HELD_OUT = "validation_"  # begins the names of figures of held-out text
NO_FIGURES = ("step", "epoch", "learning_rate", "loss_scale")
OF_THE_CLOCK = ("seconds", "_per_second", "_bytes")  # endings of what differs from one machine to another

Line = Mapping[str, float]
L = TypeVar("L", bound=Line)


def read_metrics(path: Path, *, tell: bool = False) -> list[dict[str, float]]:
    """The lines of a metrics.jsonl, which have a step and other figures; none without a file.

    Null is NaN there. Metrics only tell of a training, so lines that hold something else are left out, and
    `tell` warns of them.
    """
    if not path.exists():
        return []
    try:
        texts = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error

    lines, damaged = [], []
    for number, text in enumerate(texts, start=1):
        if not text.strip():
            continue
        try:
            values = null_is_nan(parse_object(text, path))
        except InputError:
            values = {}
        if has_type(values.get("step"), int) and values["step"] >= 0:
            lines.append({name: value for name, value in values.items() if _is_number(value)})
        else:
            damaged.append(number)

    if damaged and tell:
        warn(f"{path} is damaged in {len(damaged)} of its lines, first in line {damaged[0]}: left out")
    return lines


def _is_number(value: object) -> bool:
    return has_type(value, float) and not (isinstance(value, int) and abs(value) > LARGEST_FIGURE)


def is_figure(name: str) -> bool:
    """Whether a name is that of a figure of the model, and not of its schedule, the clock or the machine."""
    return name not in NO_FIGURES and not name.endswith(OF_THE_CLOCK)


def goodness(line: Line, measure: str | None) -> float:
    """How good the model of a validation is by the figure that decides, the higher the better.

    It is NaN where the validation does not count. The loss of fresh weights does not: it can be low, as
    SimCSE's often is, though the vectors are of no use. Their coefficient on development pairs does.
    """
    if measure is None or (line["step"] == 0 and measure != DEV_MEASURE):
        return math.nan
    figure = line.get(measure, math.nan)
    return figure if measure == DEV_MEASURE else -figure


def best_of(lines: Iterable[L], measure: str | None) -> L | None:
    """The line of the model that is kept, the first of equal ones; None where no figure decides."""
    counted = [line for line in lines if not math.isnan(goodness(line, measure))]
    return max(counted, key=lambda line: goodness(line, measure), default=None)


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
