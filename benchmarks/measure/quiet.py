"""Whether a machine was quiet while it was measured: otherwise figures of one page contradict each other.

A product of the same matrices is timed before and after each benchmark. Its rate is the machine's. Where it
varies, something else was running, here or on the host of a virtual machine.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

SIZE = 640  # of the square matrices of a probe
TRIES = 60  # the least of so many times is a probe's: a single interruption is no disturbance
MOST_SCATTER = 0.1  # of the rates of a run, relative to the best
MOST_STOLEN = 0.02  # of the processors' time, taken by the host
MOST_LOAD = 1.0  # running processes beside those of the benchmark's threads


@dataclass
class Watch:
    """What is known of a machine from probes."""

    rates: list[float] = field(default_factory=list)  # operations a second
    loads: list[float] = field(
        default_factory=list
    )  # the mean number of running processes in the last minute
    begin: tuple[int, int] | None = None  # ticks of all processors at the first probe, and those stolen

    def probe(self) -> None:
        if self.begin is None:
            self.begin = ticks()
            product_rate()  # the first of a process also starts torch's threads
        self.rates.append(product_rate())
        if hasattr(os, "getloadavg"):
            self.loads.append(os.getloadavg()[0])

    def reasons(self) -> list[str]:
        """Why the run is to be thrown away; nothing if the machine was quiet."""
        reasons = []
        if self.rates and min(self.rates) < (1 - MOST_SCATTER) * max(self.rates):
            slowest, fastest = (f"{rate / 1e9:,.0f}" for rate in (min(self.rates), max(self.rates)))
            reasons.append(f"the same product ran at {slowest} to {fastest} GFLOP/s")
        if self.loads and max(self.loads) > torch.get_num_threads() + MOST_LOAD:
            reasons.append(f"{max(self.loads):.1f} processes were running")
        stolen = self.stolen()
        if stolen > MOST_STOLEN:
            reasons.append(f"the host took {stolen:.0%} of the processors' time")
        return reasons

    def stolen(self) -> float:
        """The share of the processors' time that the host of a virtual machine took since the first probe."""
        now = ticks()
        if self.begin is None or now is None or now[0] == self.begin[0]:
            return 0.0
        return (now[1] - self.begin[1]) / (now[0] - self.begin[0])


def product_rate() -> float:
    a = torch.ones(SIZE, SIZE)
    out = torch.empty(SIZE, SIZE)
    least = min(_seconds(a, out) for _ in range(TRIES))
    return 2 * SIZE**3 / least


def _seconds(a: torch.Tensor, out: torch.Tensor) -> float:
    begin = time.perf_counter()
    torch.mm(a, a, out=out)
    return time.perf_counter() - begin


def ticks() -> tuple[int, int] | None:
    """Of all processors since the start, and those that the host has stolen. Linux alone."""
    statistics = Path("/proc/stat")
    if not statistics.exists():
        return None
    counts = [int(count) for count in statistics.read_text().splitlines()[0].split()[1:9]]
    return sum(counts), counts[7]
