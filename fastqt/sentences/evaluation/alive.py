"""Shows that a task is still being computed, which may take minutes without any other word."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from fastqt.sentences.evaluation.vectors import say

TICK = 1.0  # seconds between two looks at a bar on a terminal, which shows how long it has taken
WORD = 30.0  # seconds between two lines where there is no terminal


@contextlib.contextmanager
def alive(bar: Any, name: str) -> Iterator[None]:
    """A context in which a terminal's `bar` shows that time passes, and a pipe gets a line now and then."""
    ended, began = threading.Event(), time.monotonic()

    def tell() -> None:
        on_terminal = sys.stderr.isatty()
        while not ended.wait(TICK if on_terminal else WORD):
            if on_terminal:
                with contextlib.suppress(OSError):  # the terminal may be gone
                    bar.refresh()
            else:
                say(f"{name}: {time.monotonic() - began:.0f} s so far")

    teller = threading.Thread(target=tell, name="alive", daemon=True)
    teller.start()
    try:
        yield
    finally:
        ended.set()
        teller.join()
