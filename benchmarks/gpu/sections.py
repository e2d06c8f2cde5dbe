"""What a section of `benchmarks.gpu_check` is: a generator of records, which runs in a process of its own.

Nothing here imports torch or fastqt, so that a failing import ends one section and is recorded there.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.measure.errors import traced, words

if TYPE_CHECKING:
    import torch

__all__ = ["Options", "Record", "Section", "Verdict", "check", "check_record", "words"]

MEMORY = ("fast", "low")  # the loss's memory modes; everything is checked in both

Record = dict[str, Any]  # one result; "kind" is "machine", "check", "benchmark", ... or "end"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Options:
    quick: bool = False
    dry_run: bool = False

    @property
    def device(self) -> torch.device:
        import torch

        return torch.device("cpu") if self.dry_run else torch.device("cuda", torch.cuda.current_device())


@dataclass(frozen=True)
class Section:
    """A part of the check that runs in its own process.

    Attributes:
        name: as results call it.
        seconds: how long it may take. After that it is asked for no further record; where it hangs, the
            tracebacks of all its threads are written and it is ended.
        run: "module:function", which takes options and `arguments` and yields records.
        arguments: of that function, such as JSON can hold.
        quiet: a section that makes no record, launches and compiles nothing for so many seconds hangs.
        environment: variables of its process.
        own_cache: whether Triton compiles into a folder of its own, where a failing kernel is then found.
    """

    name: str
    seconds: float
    run: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    quiet: float | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    own_cache: bool = False

    def records(self, options: Options) -> Iterator[Record]:
        module, function = self.run.split(":")
        records: Iterator[Record] = getattr(importlib.import_module(module), function)(
            options, **self.arguments
        )
        return records


class Verdict(NamedTuple):
    """Whether a check passed, and the figures or the message behind that."""

    ok: bool | None  # None where it does not apply
    detail: str


class NotTakenError(Exception):
    """What was to be checked is not supported here; the message says why."""


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Raises NotTakenError where an engine refuses a problem that it does not support."""
    try:
        yield
    except ValueError as error:
        if str(error).startswith("backend:"):
            raise NotTakenError(str(error)) from error
        raise


def check(name: str, test: Callable[[], Verdict]) -> Record:
    """Runs a test and returns its record; that of an error has its traceback."""
    log.info("check %s", name)
    try:
        return check_record(name, test())
    except NotTakenError as reason:
        return check_record(name, Verdict(None, str(reason)))
    except Exception as error:  # Triton, CUDA and torch raise many types; the check fails with the message
        return {**check_record(name, Verdict(False, words(error))), "traceback": traced(error)}


def check_record(name: str, verdict: Verdict) -> Record:
    return {"kind": "check", "name": name, **verdict._asdict()}


class Watchdog:
    """Ends this process unless it is told of progress in time; all threads' tracebacks are written first."""

    def __init__(self, seconds: float, quiet: float | None) -> None:
        self.end = time.monotonic() + seconds
        self.quiet = quiet or seconds

    def heard(self) -> None:
        left = min(self.quiet, self.end - time.monotonic())
        faulthandler.dump_traceback_later(max(left, 0.01), exit=True)

    def stop(self) -> None:
        faulthandler.cancel_dump_traceback_later()


_watchdogs: list[Watchdog] = []  # of this process's section, if it runs one


def progress() -> None:
    """Says that this process does not hang."""
    for watchdog in _watchdogs:
        watchdog.heard()


def watch(seconds: float, quiet: float | None) -> None:
    """Begins to watch this process."""
    _watchdogs[:] = [Watchdog(seconds, quiet)]
    progress()


def unwatch() -> None:
    for watchdog in _watchdogs:
        watchdog.stop()
    _watchdogs.clear()


@functools.cache
def processors() -> int:
    return len(os.sched_getaffinity(0))
