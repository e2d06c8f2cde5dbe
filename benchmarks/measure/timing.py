"""Times taken in turns: the speed of a machine varies, so only ratios within one run are meaningful."""

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
Step = Callable[[int], list[Tensor]]  # takes the i-th inputs; returns loss and gradients, or nothing


def in_turns_with(
    benchmark: Any,  # pytest-benchmark's fixture
    subject: Callable[[], object],
    others: Mapping[str, Callable[[], object]],
    rounds: int,
) -> tuple[float, dict[str, float]]:
    """Medians in seconds of the subject and of the others, which run once before each round of the subject.

    One warm-up round of all is not counted. Where benchmarks are disabled, everything runs once, and the
    times are those of that run.
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


def beside_products(ours: float, seconds: Mapping[str, float]) -> dict[str, float | None]:
    """What a benchmark records of the medians that `in_turns_with` returns, "gemm" and perhaps "eager"."""
    gemm, eager = seconds["gemm"], seconds.get("eager")
    return {
        "gemm_seconds": gemm,
        "eager_seconds": eager,
        "ratio_to_gemm": ours / gemm,
        "eager_ratio_to_gemm": None if eager is None else eager / gemm,
    }


class Clock:
    """Measures the seconds that a device needs for a function's work, including the launches."""

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
        """Frees the memory that a failed attempt left allocated."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def peak_above_results(clock: Clock, step: Step) -> tuple[list[Tensor], int | None]:
    """A step's results, and its peak memory in bytes above inputs and results; None where not reported."""
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
    """How long contestants are measured."""

    warm_ups: int = 3
    least_rounds: int = 3
    seconds: float = 3.0  # for the turns of all contestants together


@dataclass
class Result:
    """The measurements of a contestant; `reason` says why there is no time."""

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
    """Runs every contestant once a round on the next set of inputs; one that fails gets a reason and no time.

    If a step runs `sets_a_step` sets at once, its time is divided by that number.
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
        except Exception as error:  # another library, absent or broken: the error is the result's reason
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
            except Exception as error:  # as above; the others go on
                drop(name, error)
    for name in steps:
        results[name].seconds = statistics.median(times[name]) / sets_a_step
        results[name].rounds = len(times[name])
    return results


def first_line(error: Exception) -> str:
    """The first line of an error, short enough for a table."""
    return f"{type(error).__name__}: {error}".split("\n")[0][:200]
