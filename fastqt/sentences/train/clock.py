"""What a training takes: time, by the clock and of the processors, and memory."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeVar

import torch

from fastqt.machine.memory import MIB, peak_bytes
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


def begin_peak(device: torch.device) -> None:
    """Lets the peak of a GPU's memory begin with what is in use now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> str:
    """The peak of this process in words: on the host, where its system says it, and on a GPU; "" if neither.

    That of the host is of the process as a whole, with the libraries that it has loaded. That of a GPU is
    what tensors had since `begin_peak`.
    """
    peaks = []
    if (host := peak_bytes()) is not None:
        peaks.append(f"{host / MIB:,.0f} MiB of the process")
    if device.type == "cuda":
        peaks.append(f"{torch.cuda.max_memory_allocated(device) / MIB:,.0f} MiB of tensors on the GPU")
    return f"peak memory: {', '.join(peaks)}" if peaks else ""
