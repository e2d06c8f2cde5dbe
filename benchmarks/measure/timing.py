"""Times taken in turns: the speed of a machine varies, so only ratios within one run are meaningful."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from benchmarks.measure.clocks import Meter
from benchmarks.measure.errors import words
from benchmarks.measure.kept_memory import memory_kept
from fastqt.machine import memory

MOST_ROUNDS = 50
LEAD = 1e-3  # seconds; a few launches take less
MOST_LEAD = 0.15
CYCLES_A_SECOND = 2e9  # of the fastest GPU; a slower one sleeps for longer

X = TypeVar("X")
Step = Callable[[int], list[Tensor]]  # takes the i-th inputs; returns loss and gradients, or nothing


def in_turns_with(
    benchmark: Any,  # pytest-benchmark's fixture
    subject: Callable[[], object],
    others: Mapping[str, Callable[[], object]],
    rounds: int,
) -> tuple[float, dict[str, float]]:
    """Medians in seconds of the subject and of the others, which run once before each round of the subject.

    The others run in turns forwards and backwards, since each finds the caches and the memory of the process
    as the one before has left them. One warm-up round of all is not counted. Where benchmarks are disabled,
    everything runs once, and the times are those of that run.
    """
    clock = Clock(torch.device("cpu"))
    seconds: dict[str, list[float]] = {name: [] for name in others}
    order = list(others)

    def run_others() -> None:
        for name in order:
            seconds[name].append(clock.seconds(others[name]))
        order.reverse()

    if benchmark.disabled:
        ours = benchmark.pedantic(clock.seconds, (subject,), setup=run_others)
        return ours, {name: times[0] for name, times in seconds.items()}
    with memory_kept():
        benchmark.pedantic(subject, setup=run_others, rounds=rounds, warmup_rounds=1)
    medians = {name: statistics.median(times[1:]) for name, times in seconds.items()}
    return benchmark.stats.stats.median, medians


def steps_in_a_row(
    functions: Mapping[str, Callable[[], object]], steps: int, rounds: int
) -> dict[str, float]:
    """Median seconds of each function on a CPU, in turns of one step that is not counted and `steps` more."""
    clock = Clock(torch.device("cpu"))
    seconds: dict[str, list[float]] = {name: [] for name in functions}

    def row(function: Callable[[], object]) -> None:
        for _ in range(steps):
            function()

    with memory_kept():
        for _ in range(rounds):
            for name, function in functions.items():
                function()
                seconds[name].append(clock.seconds(partial(row, function)) / steps)
    return {name: statistics.median(times) for name, times in seconds.items()}


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
    """Measures the seconds that a device needs for a function's work.

    A GPU would wait for the host between short kernels, and the time measured would be that of Python, which
    launches them. So the GPU sleeps first, for as long as the host takes to launch all: the launches are then
    queued, and only work on the device is between the two events. `launch_seconds` says what launching takes;
    where it is more than the time of the work, a user waits for Python and not for the device.

    Attributes:
        launch_seconds: how long the host took to launch the last function.
    """

    def __init__(self, device: torch.device, meter: Meter | None = None) -> None:
        self.device = device
        self.meter = meter
        self.launch_seconds = 0.0

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, function: Callable[[], object], lead: float = LEAD) -> float:
        """The seconds that the function's work takes.

        Args:
            function: launches the work.
            lead: for how many seconds a GPU sleeps first, at most `MOST_LEAD`.
        """
        self.wait()
        if self.device.type != "cuda":
            begin = time.perf_counter()
            function()
            self.launch_seconds = time.perf_counter() - begin
            return self.launch_seconds
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int(min(lead, MOST_LEAD) * CYCLES_A_SECOND))
        first.record()
        begin = time.perf_counter()
        function()
        self.launch_seconds = time.perf_counter() - begin
        last.record()
        if self.meter is not None:
            self.meter.read()
        last.synchronize()
        return first.elapsed_time(last) / 1e3

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
        return results, memory.above(torch.cuda.max_memory_allocated(clock.device) - before, results)
    tensors, peak = memory.peak_above_results(lambda: step(0))
    return list(tensors), peak


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
    launch_seconds: float | None = None  # median of what the host takes to launch a step
    clock_mhz: float | None = None  # median of the multiprocessors' clock
    power_watts: float | None = None
    meter_reason: str | None = None  # why clock and power are not known


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
    launching: dict[str, list[float]] = {name: [] for name in contestants}
    meters = {name: Meter(clock.device) for name in contestants}

    def drop(name: str, error: Exception) -> None:
        results[name].reason = words(error)
        steps.pop(name, None)

    def prepare(make: Callable[[X], Step], result: Result) -> Step:
        step = make(inputs)
        for i in range(effort.warm_ups):
            clock.wait()
            begin = time.perf_counter()
            step(i)
            result.launch_seconds = time.perf_counter() - begin
        outputs, peak = peak_above_results(clock, step)
        if outputs and outputs[0].isfinite():
            result.loss = float(outputs[0])
        result.peak_bytes = peak if sets_a_step == 1 else None
        return step

    for name, make in contestants.items():
        try:
            steps[name] = prepare(make, results[name])
        except Exception as error:  # another library, absent or broken: the error is the result's reason
            drop(name, error)
        if name not in steps:
            clock.free()

    def take_turn(turn: int) -> None:
        for name, step in list(steps.items()):
            try:
                clock.meter = meters[name]
                lead = 1.5 * (results[name].launch_seconds or 0.0) + LEAD
                times[name].append(clock.seconds(lambda step=step: step(turn), lead))
                launching[name].append(clock.launch_seconds)
            except Exception as error:  # as above; the others go on
                drop(name, error)

    with memory_kept():
        begin = time.perf_counter()
        for turn in range(MOST_ROUNDS):
            if turn >= effort.least_rounds and time.perf_counter() - begin > effort.seconds:
                break
            take_turn(turn)
    clock.meter = None
    for name in steps:
        result, meter = results[name], meters[name]
        result.seconds = statistics.median(times[name]) / sets_a_step
        result.launch_seconds = statistics.median(launching[name]) / sets_a_step
        result.rounds = len(times[name])
        result.clock_mhz, result.power_watts = meter.medians()
        result.meter_reason = meter.reason
    return results


def first_line(error: Exception) -> str:
    """The first line of an error, short enough for a table."""
    return f"{type(error).__name__}: {error}".split("\n")[0][:200]
