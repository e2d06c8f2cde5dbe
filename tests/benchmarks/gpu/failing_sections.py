"""Sections that fail in every way in which one can on a GPU; test_failures.py runs them."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import time
from collections.abc import Iterator
from unittest import mock

from benchmarks.gpu.sections import Options, Record, Section, Verdict, check

QUIET = 0.4  # seconds
ILLEGAL = "Triton Error [CUDA]: an illegal memory access was encountered"


def section(name: str, seconds: float = 60, **more: object) -> Section:
    return Section(name, seconds, f"tests.benchmarks.gpu.failing_sections:{name}", **more)


def absent_import(options: Options) -> Iterator[Record]:
    import no_such_library  # noqa: F401

    yield {}


def hang(options: Options) -> Iterator[Record]:
    yield check("first", lambda: Verdict(True, ""))
    yield check("sleeps", lambda: Verdict(time.sleep(60) is None, ""))


def hang_with_the_interpreter_locked(options: Options) -> Iterator[Record]:
    yield check("backtracks", lambda: Verdict(re.match("(a|aa)*b", 200 * "a") is None, ""))


def stopped(options: Options) -> Iterator[Record]:
    """A process that not even its own watchdog can end."""
    yield check("stops", lambda: Verdict(os.kill(os.getpid(), signal.SIGSTOP) is None, ""))


def crash(options: Options) -> Iterator[Record]:
    yield check("reads address 0", lambda: Verdict(bool(ctypes.string_at(0)), ""))


def killed(options: Options) -> Iterator[Record]:
    yield check("is killed", lambda: Verdict(os.kill(os.getpid(), signal.SIGKILL) is None, ""))


def launch(options: Options) -> Iterator[Record]:
    """A genuine step, whose launches the driver refuses."""
    from triton.runtime.interpreter import InterpretedFunction

    from benchmarks.gpu.smoke.scores import scores

    with mock.patch.object(InterpretedFunction, "run", side_effect=RuntimeError(ILLEGAL), autospec=True):
        yield from scores(options, "EXP")


def wrong_value(options: Options) -> Iterator[Record]:
    """A genuine step, whose kernel's sums are 1 % too large."""
    from benchmarks.gpu.smoke import scores

    right = scores.LAUNCHES["EXP"]

    def rough(tile, x, out, config):
        right(tile, x, out, config)
        out.tile_row_sums *= 1.01

    with mock.patch.dict(scores.LAUNCHES, EXP=rough):
        yield from scores.scores(options, "EXP")


def compilation(options: Options) -> Iterator[Record]:
    """Kernels that Triton refuses, and one that it takes and ptxas refuses."""
    del os.environ["TRITON_INTERPRET"]
    from benchmarks.gpu.recorder import recorded_check
    from tests.benchmarks.gpu import failing_kernels

    for kernel in (failing_kernels.undefined_kernel, failing_kernels.unknown_instruction_kernel):
        yield recorded_check(kernel.__name__, lambda kernel=kernel: failing_kernels.compiled(kernel))
