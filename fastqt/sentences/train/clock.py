"""How long a training takes: by the clock on the wall, and by what its process gets of the processors."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeVar

from torch.profiler import record_function

from fastqt.sentences.runs.progress import Progress

T = TypeVar("T")
PARTS = ("data", "gradients", "optimiser")  # of a step, in metrics.jsonl with _seconds behind them


class Parts:
    """How many seconds of the steps since the last report went into each of their parts.

    They are those that pass on the host, which does not wait for a GPU: what a GPU computes counts where the
    host next waits for it. `data` is the reading of batches, `gradients` the encoders and the loss, forwards
    and backwards, with the exchange between processes, and `optimiser` the rest of a step.
    """

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(PARTS, 0.0)

    @contextlib.contextmanager
    def of(self, part: str) -> Iterator[None]:
        """A context whose time is added to that of a part."""
        began = time.perf_counter()
        with record_function(part):  # which names the part in a trace
            yield
        self._seconds[part] += time.perf_counter() - began

    def reading(self, batches: Iterable[T]) -> Iterator[T]:
        """The same batches; the time until each of them is there is that of the data."""
        iterator = iter(batches)
        while True:
            with self.of("data"):
                batch = next(iterator, None)
            if batch is None:
                return
            yield batch

    def take(self) -> dict[str, float]:
        """The seconds for a line of metrics.jsonl; they begin again at 0."""
        line = {f"{part}_seconds": seconds for part, seconds in self._seconds.items()}
        self._seconds = dict.fromkeys(PARTS, 0.0)
        return line


class Moment(NamedTuple):
    """A moment of a training.

    On a machine that also does other work, the seconds of the processors tell trainings apart better than
    those that pass. All threads of this process count, those that compute and those that wait actively.
    """

    seconds: float  # of any clock
    cpu_seconds: float  # that this process has got of all processors

    @classmethod
    def now(cls) -> Moment:
        """This moment."""
        return cls(time.perf_counter(), time.process_time())

    def since(self, earlier: Moment) -> Moment:
        """The time between an earlier moment and this one."""
        return Moment(self.seconds - earlier.seconds, self.cpu_seconds - earlier.cpu_seconds)

    def add_to(self, progress: Progress) -> None:
        """Adds this time to those of a training's progress, in place."""
        progress.seconds += self.seconds
        progress.cpu_seconds += self.cpu_seconds
