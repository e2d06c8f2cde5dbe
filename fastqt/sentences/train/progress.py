"""The display of a running training, and the signals that stop it."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any

from tqdm import tqdm

from fastqt.sentences.runs.metrics_file import HELD_OUT, is_figure


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
            shown.append(f"{label} {value:.{4 if name == 'chance' else 3}f}")
        return " ".join(shown)

    return show(training) + (f" | held out: {show(held_out)}" if held_out else "")


def _say(text: str) -> None:
    """Prints on standard error. A training does not end because nobody reads it, as after `2>&1 | head`."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


class Display:
    """Shows the progress on standard error: a bar on a terminal, otherwise one line per report.

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
        if self._bar is not None:
            self._bar.set_postfix_str(figures, refresh=False)
            return
        said = f"step {line['step']} {figures.strip()}"
        if (rate := line.get("sentences_per_second")) is not None:
            left = max(self.total - self.done, 0) / rate
            said += f" | {rate:,.0f} sentences/s, {tqdm.format_interval(left)} left"
        _say(said)

    def __enter__(self) -> Display:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
