"""What a training shows while it runs, and how it is asked to stop."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any

from tqdm import tqdm

COUNTS = {"step", "sentences_per_second", "seconds"}
HELD_OUT = "validation_"


def _figures(line: dict[str, float]) -> str:
    """The figures of a report by their names, those of held-out text last."""
    ours, held_out = (
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

    return show(ours) + (f" | held out: {show(held_out)}" if held_out else "")


class Display:
    """A progress bar on a terminal; elsewhere a line a report. Both on standard error.

    Args:
        total: sentences in the whole training.
        done: sentences of earlier sessions.
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
        """Says on a terminal what is going on before the training."""
        if sys.stderr.isatty():
            print(text, file=sys.stderr, flush=True)

    def advance(self, sentences: int) -> None:
        self.done += sentences
        if self._bar is not None:
            self._bar.update(sentences)

    def report(self, line: dict[str, float]) -> None:
        """Shows a line of metrics.jsonl."""
        figures = _figures({name: value for name, value in line.items() if name not in COUNTS})
        if self._bar is not None:
            self._bar.set_postfix_str(figures, refresh=False)
            return
        rate = line["sentences_per_second"]
        left = max(self.total - self.done, 0) / rate
        print(
            f"step {line['step']} {figures} | {rate:,.0f} sentences/s, {tqdm.format_interval(left)} left",
            file=sys.stderr,
            flush=True,
        )

    def __enter__(self) -> Display:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()


class StopRequest:
    """Within this context SIGTERM and Ctrl-C are noted, not obeyed; a second Ctrl-C interrupts at once."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, Any] = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal == signal.SIGINT == number:
            raise KeyboardInterrupt
        self.signal = number

    def __enter__(self) -> StopRequest:
        # Python delivers signals to the main thread, and lets no other set handlers.
        if threading.current_thread() is threading.main_thread():
            self._before = {
                number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)
            }
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
