"""Times taken in turns: on a machine whose speed wanders, only ratios within one run mean something."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from fastqt.tools.bench import peak_memory

MOST_ROUNDS = 50

X = TypeVar("X")
Step = Callable[[int], list[Tensor]]  # on the i-th of its inputs: a loss and its gradients, or nothing


def in_turns_with(
    benchmark: Any,  # pytest-benchmark's fixture
    subject: Callable[[], object],
    others: Mapping[str, Callable[[], object]],
    rounds: int,
) -> tuple[float, dict[str, float]]:
    """Medians in seconds of the subject, and of the others, each run once before every round of it.

    One warm-up round of all is not counted. Where benchmarks are disabled, all run once, and these are
    the times of that.
    """
    clock = Clock(torch.device("cpu"))
    seconds: dict[str, list[float]] = {name: [] for name in others}

    def run_others() -> None:
        for name, function in others.items():
            seconds[name].append(clock.seconds(function))

    if benchmark.disabled:
        ours = benchmark.pedantic(clock.seconds, (subject,), setup=run_others)
        return ours, {name: times[0] for name, times in seconds.items()}
    benchmark.pedantic(subject, setup=run_others, rounds=rounds, warmup_rounds=1)
    medians = {name: statistics.median(times[1:]) for name, times in seconds.items()}
    return benchmark.stats.stats.median, medians


class Clock:
    """Seconds that a device needs for what a function asks of it, its launches included."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, function: Callable[[], object]) -> float:
        self.wait()
        if self.device.type != "cuda":
            begin = time.perf_counter()
            function()
            return time.perf_counter() - begin
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def free(self) -> None:
        """Hands back what a failed attempt left."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def peak_above_results(clock: Clock, step: Step) -> tuple[list[Tensor], int | None]:
    """A step's results, and by how much memory in use rose at most beside them; None if nobody tells."""
    if clock.device.type == "cuda":
        clock.wait()
        torch.cuda.reset_peak_memory_stats(clock.device)
        before = torch.cuda.memory_allocated(clock.device)
        results = step(0)
        clock.wait()
        peak = torch.cuda.max_memory_allocated(clock.device) - before
    else:
        results, peak = peak_memory(lambda: step(0))
    if peak is None:
        return results, None
    return results, max(peak - sum(x.numel() * x.element_size() for x in results), 0)


@dataclass(frozen=True)
class Effort:
    """How long contestants are measured for."""

    warm_ups: int = 3
    least_rounds: int = 3
    seconds: float = 3.0  # of turns, for all together


@dataclass
class Result:
    """What is known of a contestant; `reason` says why there is no time."""

    seconds: float | None = None  # median of a step
    rounds: int = 0
    peak_bytes: int | None = None  # above inputs and gradients
    loss: float | None = None
    reason: str | None = None


def in_turns(
    contestants: Mapping[str, Callable[[X], Step]],
    inputs: X,
    clock: Clock,
    effort: Effort,
    sets_a_step: int = 1,
) -> dict[str, Result]:
    """Every contestant once a round, on the next set of inputs; one that fails gets a reason and no time.

    With `sets_a_step` a step does as many sets at once, and its time is divided by them.
    """
    results = {name: Result() for name in contestants}
    steps: dict[str, Step] = {}
    times: dict[str, list[float]] = {name: [] for name in contestants}

    def drop(name: str, error: Exception) -> None:
        results[name].reason = first_line(error)
        steps.pop(name, None)

    def prepare(make: Callable[[X], Step], result: Result) -> Step:
        step = make(inputs)
        for i in range(effort.warm_ups):
            step(i)
        found, peak = peak_above_results(clock, step)
        if found and found[0].isfinite():
            result.loss = float(found[0])
        result.peak_bytes = peak if sets_a_step == 1 else None
        return step

    for name, make in contestants.items():
        try:
            steps[name] = prepare(make, results[name])
        except Exception as error:  # others' code, absent or broken: what it raises is its result's reason
            drop(name, error)
        if name not in steps:
            clock.free()

    begin = time.perf_counter()
    for turn in range(MOST_ROUNDS):
        if turn >= effort.least_rounds and time.perf_counter() - begin > effort.seconds:
            break
        for name, step in list(steps.items()):
            try:
                times[name].append(clock.seconds(lambda step=step, turn=turn: step(turn)))
            except Exception as error:  # as above, and the others go on
                drop(name, error)
    for name in steps:
        results[name].seconds = statistics.median(times[name]) / sets_a_step
        results[name].rounds = len(times[name])
    return results


def first_line(error: Exception) -> str:
    """An error as it fits into a table."""
    return f"{type(error).__name__}: {error}".split("\n")[0][:200]
