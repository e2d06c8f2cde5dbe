"""A running training: its display, the signals that stop it, the time and the memory that it takes."""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import torch
from tqdm import tqdm

from fastqt.machine.memory import MIB, peak_bytes
from fastqt.sentences.runs.metrics_file import HELD_OUT, is_figure
from fastqt.sentences.runs.progress import Progress

T = TypeVar("T")
SHARES = ("accuracy", "chance")  # figures whose names end so are shown in per cent
PARTS = ("data", "gradients", "optimiser")  # of a step, in metrics.jsonl with _seconds behind them


def _figures(line: dict[str, float]) -> str:
    """The metrics of a report as text; those of the held-out text come last."""
    training, held_out = (
        [(name, value) for name, value in line.items() if name.startswith(HELD_OUT) == held]
        for held in (False, True)
    )

    def show(figures: list[tuple[str, float]]) -> str:
        shown = []
        for name, value in figures:
            label = (
                name.removeprefix(HELD_OUT)
                .removesuffix("_accuracy")
                .removesuffix("_cosine")
                .replace("_", " ")
            )
            share = f"{value:.{2 if name.endswith('chance') else 1}%}"
            shown.append(f"{label} {share}" if name.endswith(SHARES) else f"{label} {value:.3f}")
        return " ".join(shown)

    return show(training) + (f" | held out: {show(held_out)}" if held_out else "")


def _in_lines(report: str, width: int) -> str:
    """A report of several parts, of which those that a terminal has no room for begin a line."""
    lines: list[str] = []
    for part in report.split(" | "):
        if lines and len(lines[-1]) + len(" | ") + len(part) <= width:
            lines[-1] += f" | {part}"
        else:
            lines.append(f"    {part}" if lines else part)
    return "\n".join(lines)


def _say(text: str) -> None:
    """Prints on standard error. A training does not end because nobody reads it, as after `2>&1 | head`."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


class Display:
    """Shows the progress on standard error: a line for each report, and on a terminal a bar below them.

    Of the `total` sentences of the whole training, `done` were trained on before this run was resumed.
    """

    def __init__(self, total: int, done: int) -> None:
        self.total, self.done = total, done
        self._bar: tqdm[Any] | None = None
        if sys.stderr.isatty():
            self._bar = tqdm(
                total=total, initial=done, unit="sent", unit_scale=True, dynamic_ncols=True, smoothing=0.05
            )

    @staticmethod
    def note(text: str) -> None:
        """Prints, on a terminal only, what happens before the first step."""
        if sys.stderr.isatty():
            _say(text)

    @staticmethod
    def say(text: str) -> None:
        """Prints what a user has to know before the first step."""
        _say(text)

    def advance(self, sentences: int) -> None:
        """Counts the sentences of one more step."""
        self.done += sentences
        if self._bar is not None:
            with contextlib.suppress(OSError):  # the terminal may be gone
                self._bar.update(sentences)

    def report(self, line: dict[str, float]) -> None:
        """Shows a line of metrics.jsonl."""
        figures = _figures({name: value for name, value in line.items() if is_figure(name)})
        said = f"step {line['step']} {figures.strip()}"
        if (rate := line.get("sentences_per_second")) is not None:
            left = max(self.total - self.done, 0) / rate
            said += f" | {rate:,.0f} sentences/s, {tqdm.format_interval(left)} left"
        if self._bar is None:
            _say(said)
            return
        with contextlib.suppress(OSError):  # the terminal may be gone
            self._bar.write(_in_lines(said, shutil.get_terminal_size().columns), file=sys.stderr)

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *about: object) -> None:
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.close()


class Silent(Display):
    """Shows nothing: the display of a rank whose progress rank 0 shows."""

    def __init__(self, total: int, done: int) -> None:
        self.total, self.done, self._bar = total, done, None

    def report(self, line: dict[str, float]) -> None:
        return


class StopRequest:
    """A context in which SIGTERM and Ctrl-C only set `signal`, so that the training can save and stop.

    With `insists` a second Ctrl-C raises KeyboardInterrupt at once. torchrun passes the first one on to its
    processes, which then get two.
    """

    def __init__(self, *, insists: bool = True) -> None:
        self.signal: int | None = None
        self._insists = insists
        self._previous_handlers: dict[int, Any] = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._insists and self.signal == signal.SIGINT == number:
            raise KeyboardInterrupt
        self.signal = number

    def __enter__(self) -> StopRequest:
        # Python delivers signals to the main thread only, and other threads may not set handlers.
        if threading.current_thread() is threading.main_thread():
            self._previous_handlers = {
                number: signal.signal(number, self._handle) for number in (signal.SIGTERM, signal.SIGINT)
            }
        return self

    def __exit__(self, *about: object) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)


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
