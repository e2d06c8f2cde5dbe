"""Calls in several threads at once."""

import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

THREADS = 8


def in_threads(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """The results of calls that THREADS threads make, which all begin together and switch very often."""
    start = threading.Barrier(THREADS)

    def share(thread: int) -> list[Any]:
        start.wait()
        return [call() for call in calls[thread::THREADS]]

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(THREADS) as pool:
            shares = [*pool.map(share, range(THREADS))]
    finally:
        sys.setswitchinterval(interval)
    return [shares[number % THREADS][number // THREADS] for number in range(len(calls))]


class Switching:
    """An object of which a method gives way to another thread, in its first call, before and after its work.

    The other thread makes the call `meanwhile`. It may have to wait for this one, so this one goes on after a
    second.
    """

    def __init__(self, genuine: Any, method: str, meanwhile: Callable[[], Any]) -> None:
        self._genuine, self._method, self._meanwhile = genuine, method, meanwhile
        self._threads: list[threading.Thread] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # which an unfinished copy of this object is asked for
            raise AttributeError(name)
        attribute = getattr(self._genuine, name)
        return attribute if name != self._method else lambda *args, **options: self._call(*args, **options)

    def _call(self, *args: Any, **options: Any) -> Any:
        switches = not self._threads
        if switches:
            self._switch()
        result = getattr(self._genuine, self._method)(*args, **options)
        if switches:
            self._switch()
        return result

    def _switch(self) -> None:
        self._threads.append(threading.Thread(target=self._meanwhile))
        self._threads[-1].start()
        self._threads[-1].join(timeout=1)

    def finish(self) -> None:
        """Waits for what other threads do."""
        for thread in self._threads:
            thread.join()
