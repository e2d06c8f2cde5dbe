"""Times and memory are those of the work alone, of functions that take turns, on a machine that is quiet."""

import json
import os
import platform
from functools import partial

import pytest
import torch

from benchmarks.measure import quiet, timing, workloads
from benchmarks.measure.quiet import Watch
from benchmarks.measure.timing import (
    Clock,
    Effort,
    in_turns,
    in_turns_with,
    steps_in_a_row,
)
from benchmarks.render import quiet_run
from fastqt.machine import memory
from fastqt.machine.memory import MALLOC_VARIABLES, MIB, status_bytes


def test_turns(benchmark):
    """Plain `pytest` runs each function once; `pytest --benchmark` runs one warm-up round and the rounds."""
    order = []
    ours, others = in_turns_with(
        benchmark, lambda: order.append("ours"), {"theirs": lambda: order.append("theirs")}, rounds=3
    )
    assert order == ["theirs", "ours"] * (1 if benchmark.disabled else 4)
    assert ours > 0
    assert others.keys() == {"theirs"}
    assert others["theirs"] > 0


def test_steps_in_a_row(monkeypatch):
    order = []

    def seconds(clock, function):
        before = len(order)
        function()
        order.append("timed")
        return float(before)

    monkeypatch.setattr(Clock, "seconds", seconds)
    functions = {name: partial(order.append, name) for name in ("ours", "theirs")}
    # The medians of 1 and 9, and of 5 and 13, each for two steps.
    assert steps_in_a_row(functions, steps=2, rounds=2) == {"ours": 5 / 2, "theirs": 9 / 2}
    assert order == [*["ours"] * 3, "timed", *["theirs"] * 3, "timed"] * 2


def test_the_peak_is_above_the_results(monkeypatch):
    """The growth of the process is given here: the loss and the gradients are taken away from it."""
    monkeypatch.setattr(memory, "growth_of_process", lambda function: (function(), 100 * MIB))
    N, D = 64, 16
    leaves = workloads.embeddings(N, N, D=D)
    run = workloads.forward_and_backward(lambda: (leaves[0] @ leaves[1].T).sum(), *leaves)
    assert workloads.peak_above_gradients(run, leaves) == 100 * MIB - 2 * N * D * 4

    one_mib = torch.ones(MIB // 4)
    results, peak = timing.peak_above_results(timing.Clock(torch.device("cpu")), lambda i: [one_mib.clone()])
    assert (len(results), peak) == (1, 99 * MIB)


of_malloc = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in MALLOC_VARIABLES),
    reason="glibc's malloc alone is told to keep freed memory, unless the environment sets it up",
)

SIZE = 128 << 20  # bytes


def freed(size: int = SIZE) -> int:
    """By how many bytes the process shrinks when a large tensor is freed."""
    large = torch.ones(size // 4)
    before = status_bytes("VmRSS")
    del large
    return before - status_bytes("VmRSS")


@of_malloc
def test_functions_are_timed_while_it_is_kept() -> None:
    sizes = []

    def step(turn: int) -> list[torch.Tensor]:
        sizes.append(freed(4 * SIZE))  # more than the other test can have left in the heap
        return []

    in_turns({"a": lambda inputs: step}, None, Clock(torch.device("cpu")), Effort(0, 3, 0.0))
    of_memory, *timed = sizes
    assert of_memory > 0.9 * 4 * SIZE  # The peak of memory is measured with malloc as it is.
    assert len(timed) == 3
    assert max(timed) < 0.1 * SIZE


def watched(monkeypatch, rates=(1e11, 0.95e11), load=1.0, ticks=((1000, 0), (3000, 10))):
    """A watch that has probed a machine with these rates, loads and ticks."""
    given, counted = iter([1.0, *rates]), iter([*ticks, *ticks[-1:] * len(rates)])
    monkeypatch.setattr(quiet, "product_rate", lambda: next(given))
    monkeypatch.setattr(quiet.os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(quiet, "ticks", lambda: next(counted))
    watch = Watch()
    for _ in rates:
        watch.probe()
    return watch


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ({"rates": (1e11, 0.85e11, 1e11)}, "the same product ran at 85 to 100 GFLOP/s"),
        ({"load": 9.0}, "9.0 processes were running"),
        ({"ticks": ((1000, 0), (3000, 200))}, "the host took 10% of the processors' time"),
    ],
)
def test_what_else_ran_is_a_reason(monkeypatch, found, reason):
    assert watched(monkeypatch, **found).reasons() == [reason]


def test_a_disturbed_run_is_not_rendered(tmp_path):
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"benchmarks": [], "disturbed": []}))
    assert quiet_run(path)["benchmarks"] == []
    path.write_text(json.dumps({"benchmarks": [], "disturbed": ["9.0 processes were running"]}))
    with pytest.raises(SystemExit, match=r"run.json: measure again.*9.0 processes were running"):
        quiet_run(path)
