"""A trace of some steps of a training, and its peak of memory."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

import torch
from torch.profiler import ProfilerActivity, profile

from fastqt.machine.memory import peak_bytes
from fastqt.sentences.errors import only_a_report
from fastqt.sentences.runs.files import check_can_be_written, check_ending, write_atomically

FIRST_TRACED = 11  # step of a call of `train`; those before it allocate memory and fill caches
TRACED = 5  # steps
MIB = 1 << 20


def check_trace(path: str) -> None:
    """Checks, before a training, that a trace can be written to a file: in Chrome's format, as .json."""
    check_ending(path, ".json")
    check_can_be_written(path)


class Trace:
    """A context in which `end_step` is called after each step, of which some are traced by torch's profiler.

    The trace is written to `path`, without which nothing is traced. A training of fewer steps than come
    before the first traced one is traced from its start. One that is stopped has the steps until then in its
    trace, and no trace if none of them is to be traced; `say` tells which steps were. So many `steps` are
    left after those `before`, which earlier calls have taken.
    """

    def __init__(self, path: str | None, before: int, steps: int, say: Callable[[str], None]) -> None:
        self._path, self._before, self._say, self._done = path, before, say, 0
        self._first = min(FIRST_TRACED, max(steps - TRACED + 1, 1))
        self._profile: profile | None = None

    def end_step(self) -> None:
        """Begins the trace after the step before its first one, and writes it after its last one."""
        self._done += 1
        if self._done == self._first + TRACED - 1:
            self._write()
        self._begin_if_due()

    def _begin_if_due(self) -> None:
        if self._path is not None and self._done == self._first - 1:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=activities)
            self._profile.start()

    def _write(self) -> None:
        """Writes the trace, unless there is none or it has been written."""
        trace, self._profile = self._profile, None
        if trace is None or self._path is None:
            return
        trace.stop()
        with only_a_report(f"the trace {self._path}"):
            write_atomically(self._path, lambda partial: trace.export_chrome_trace(str(partial)))
            first, last = (self._before + number for number in (self._first, self._done))
            self._say(f"{self._path}: trace of steps {first} to {last} for ui.perfetto.dev")

    def __enter__(self) -> Trace:
        self._begin_if_due()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and self._done >= self._first:
            self._write()
            return
        if self._profile is not None:
            self._profile.stop()
        if error is None and self._path is not None:
            first = self._before + self._first
            self._say(f"{self._path}: not written, because the training ended before step {first}")


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
