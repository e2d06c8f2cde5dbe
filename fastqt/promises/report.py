"""What became of the products of a block, line by line of the user's own code."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch

_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


class Event(NamedTuple):
    """A line of a program, and what it did with a score matrix."""

    file: str  # and the number of its line
    number: int
    function: str  # that it called
    by: str  # the call of fastqt that took its place; "" where the cells were computed
    bytes_of_cells: int  # that were computed


class Report:
    """What a `fused` block has done; printed, a line for each of the program.

    Attributes:
        fused: how often a call of fastqt took the place of functions of a score matrix.
        computed: how often the cells of a score matrix were computed after all.
    """

    def __init__(self) -> None:
        self._events: Counter[Event] = Counter()

    @property
    def fused(self) -> int:
        return sum(count for event, count in self._events.items() if event.by)

    @property
    def computed(self) -> int:
        return sum(count for event, count in self._events.items() if not event.by)

    def add(self, function: str, by: str = "", bytes_of_cells: int = 0) -> Event:
        event = Event(*_line_of_user(), function, by, bytes_of_cells)
        self._events[event] += 1
        return event

    def correct(self, event: Event, **changes: Any) -> None:
        """Tells once otherwise what has been told."""
        self._events[event] -= 1
        self._events += Counter()  # without those of which there are none
        self._events[event._replace(**changes)] += 1

    def clear(self) -> None:
        self._events.clear()

    def __str__(self) -> str:
        if not self._events:
            return "no product of two matrices was large enough to be fused"
        return "\n".join(_told(event, count) for event, count in self._events.items())


def _told(event: Event, count: int) -> str:
    times = f", {count} times" if count > 1 else ""
    line = f"{Path(event.file).name}:{event.number}"
    if event.by:
        return f"{line}: {event.function} fused into {event.by}{times}"
    size = event.bytes_of_cells / 2**20
    return f"{line}: {event.function} wanted the score matrix, {size:.1f} MiB{times}"


def _line_of_user() -> tuple[str, int]:
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno
