"""Times taken in turns: on a machine whose speed wanders, only ratios within one run mean something."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any


def in_turns(
    benchmark: Any,  # pytest-benchmark's fixture
    subject: Callable[[], object],
    others: Mapping[str, Callable[[], object]],
    rounds: int,
) -> dict[str, float]:
    """Medians in seconds of the others, each run once before every round of the subject.

    The subject's own statistics are the benchmark's. One warm-up round of all is not counted.
    """
    seconds: dict[str, list[float]] = {name: [] for name in others}

    def run_others() -> None:
        for name, function in others.items():
            begin = time.perf_counter()
            function()
            seconds[name].append(time.perf_counter() - begin)

    benchmark.pedantic(subject, setup=run_others, rounds=rounds, warmup_rounds=1)
    return {name: statistics.median(times[1:]) for name, times in seconds.items()}
