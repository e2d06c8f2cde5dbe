"""How the processes of a training learn that one of them has failed, and which."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple

from fastqt.distributed.faults import ExchangeError
from fastqt.errors import InputError, one_line
from fastqt.sentences.errors import OtherRankError
from fastqt.sentences.json_text import to_json

BEAT = 1.0  # seconds between two signs of life of a process
STILL = 4.0  # seconds without a sign of life, once an exchange has failed, that make a process a dead one
NEWS = 2.0  # seconds that the words of a failed process may take to arrive
GRACE = 5.0  # seconds after which a process that still waits for a failed one is ended
STATUS = 2  # its exit status: that of fastqt's errors
FAILED = "failed"


class Failure(NamedTuple):
    """Which rank failed and how. `by_itself`: the rank says so; otherwise another one noticed."""

    rank: int
    words: str
    by_itself: bool

    def error_for(self, rank: int) -> OtherRankError:
        """The error that `rank` raises. Rank 0 tells the user, unless it is the one that failed silently."""
        is_told = rank != 0 and (self.rank != 0 or self.by_itself)
        return OtherRankError(f"rank {self.rank} {self.words}", is_told=is_told)


class Watch:
    """Gives signs of life in a thread, and notices what becomes of the other processes.

    An exchange of torch.distributed with a process that has died fails or never ends, and does not say whose
    fault that is. A store of torch.distributed, which does not depend on these exchanges, does: there each
    process counts its signs of life and its exchanges, and the first failure is written. A process without a
    sign of life for `timeout` seconds has failed.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: float) -> None:
        # With a connection of its own, a sign of life need not wait until torch's own use of the store ends.
        self.store: Any = store.clone()
        self.rank, self.size, self.timeout = rank, size, timeout
        self._beats, self._exchanges = 0, 0
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._ended = threading.Event()
        self._beat()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Starts the thread; by then each process must have made its watch."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread."""
        self._ended.set()
        self._thread.join()

    def count_exchange(self) -> None:
        """Notes that this process is about to exchange data, or works alone until the next exchange."""
        self._exchanges += 1

    def check(self) -> None:
        """Raises what `Failure.error_for` returns if a process has failed."""
        if (failure := self._written()) is not None:
            raise failure.error_for(self.rank)

    def explain(self, error: BaseException) -> BaseException:
        """Tells the other processes of an error, unless it is the consequence of a failure of theirs.

        Returns the error to raise: the same one, or one that names the rank that failed.
        """
        # torchrun sends it to all others as soon as one process has ended.
        with sigterm_handled(signal.SIG_IGN):
            try:
                return self._explanation(error)
            except RuntimeError:  # the store is gone, which rank 0 keeps where torchrun does not
                return Failure(0, "has died", by_itself=False).error_for(self.rank)
            finally:
                self._ended.set()

    def _explanation(self, error: BaseException) -> BaseException:
        if isinstance(error, OtherRankError):
            return error
        failure = self._news() if isinstance(error, RuntimeError | SystemExit) else None
        if failure is None and isinstance(error, RuntimeError):
            waited = isinstance(error, ExchangeError) or re.search("[Tt]imed ?out", str(error)) is not None
            failure = self._silent_rank(waited)
        if failure is not None:
            self._write(failure)
            return failure.error_for(self.rank)
        if isinstance(error, ExchangeError):  # Its words name the ranks that others have waited for.
            return OtherRankError(str(error), is_told=self.rank != 0)
        if not isinstance(error, SystemExit):
            words = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
            self._write(Failure(self.rank, f"has failed: {one_line(words, 1000)}", by_itself=True))
        return error

    def _news(self) -> Failure | None:
        """What another process wrote about a failure, if it does so soon."""
        end = time.monotonic() + NEWS
        while (failure := self._written()) is None and time.monotonic() < end:
            time.sleep(0.05)
        return failure

    def _silent_rank(self, waited: bool) -> Failure | None:
        """Finds the rank that has died or, if this one has waited in vain, the one that is behind."""
        before = self._signs()
        time.sleep(STILL)
        after = self._signs()
        for rank, (old, new) in enumerate(zip(before, after, strict=True)):
            if old == new and rank != self.rank:
                return Failure(rank, f"({_place(new)}) has died or hangs", by_itself=False)
        exchanges = [int(sign.split()[1]) for sign in after]
        if waited and min(exchanges) < self._exchanges:
            slow = exchanges.index(min(exchanges))
            words = f"({_place(after[slow])}) did not answer within {self.timeout:g} s"
            return Failure(slow, words, by_itself=False)
        return None

    def _run(self) -> None:
        failure = None
        while failure is None and not self._ended.wait(BEAT):
            try:
                self._beat()
                failure = self._written() or self._still_rank()
            except RuntimeError:
                failure = Failure(0, "has died", by_itself=False)
        if failure is not None and not self._ended.wait(GRACE):
            error = failure.error_for(self.rank)
            if not error.is_told:
                print(f"fastqt: {error}", file=sys.stderr, flush=True)
            os._exit(STATUS)

    def _still_rank(self) -> Failure | None:
        """Rank 0 looks for signs of life of all others, and these for those of rank 0."""
        now = time.monotonic()
        for rank, sign in enumerate(self._signs(() if self.rank == 0 else (0,))):
            if rank == self.rank:
                continue
            if rank not in self._seen or self._seen[rank][0] != sign:
                self._seen[rank] = sign, now
            elif now - self._seen[rank][1] > self.timeout:
                words = f"({_place(sign)}) gave no sign of life for {self.timeout:g} s"
                failure = Failure(rank, words, by_itself=False)
                self._write(failure)
                return failure
        return None

    def _beat(self) -> None:
        self._beats += 1
        place = f"process {os.getpid()} on host {platform.node()}"
        self.store.set(_sign_of(self.rank), f"{self._beats} {self._exchanges} {place}")

    def _signs(self, ranks: tuple[int, ...] = ()) -> list[bytes]:
        """The last signs of life of ranks, by default of all."""
        signs: list[bytes] = self.store.multi_get([_sign_of(rank) for rank in ranks or range(self.size)])
        return signs

    def _write(self, failure: Failure) -> None:
        """Writes a failure for the others to read, unless one is written already."""
        self.store.compare_set(FAILED, "", to_json(failure))

    def _written(self) -> Failure | None:
        return Failure(*json.loads(self.store.get(FAILED))) if self.store.check([FAILED]) else None


def _sign_of(rank: int) -> str:
    return f"sign/{rank}"


def _place(sign: bytes) -> str:
    """Where a rank runs, of which this is a sign of life."""
    return one_line(sign.decode(errors="replace").split(maxsplit=2)[2])


@contextlib.contextmanager
def sigterm_handled(by: Callable[[int, FrameType | None], None] | signal.Handlers) -> Iterator[None]:
    """A context with another handler of SIGTERM, which the main thread alone may set and gets."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, by)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
