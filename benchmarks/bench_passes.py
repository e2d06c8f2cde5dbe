"""The vectorised passes of the CPU engine at each x86 level, in nanoseconds for a number on one core."""

from __future__ import annotations

import statistics
import subprocess
from collections.abc import Callable

import pytest

from benchmarks.measure.timing import in_turns_with
from tests.csrc import building
from tests.csrc.cpu.processors import OPTIMISED, PROCESSORS

SOURCES = ("benchmarks/passes.cpp", "csrc/cpu/row_passes.cpp", "csrc/cpu/gru_rows.cpp")
HEADERS = ("csrc/cpu/row_passes.h", "csrc/cpu/gru_rows.h", "csrc/cpu/vector_math.h")
SUBJECT = "clones"  # the build that chooses a level by itself, as the package does
LEVELS = ("x86-64", "x86-64-v3", "x86-64-v4", "clones of clang")
ROUNDS = 3


def test_passes(benchmark):
    missing = {name: PROCESSORS[name].why_not() for name in (SUBJECT, *LEVELS)}
    if missing[SUBJECT] is not None:
        pytest.skip(missing[SUBJECT])
    by_processor: dict[str, dict[str, list[float]]] = {}

    def runs(name: str) -> Callable[[], None]:
        processor, times = PROCESSORS[name], by_processor.setdefault(name, {})
        flags = (*OPTIMISED, *processor.flags)
        program = processor.built(dict.fromkeys(SOURCES, flags), headers=HEADERS)

        def run() -> None:
            printed = subprocess.run([program], capture_output=True, text=True, check=True).stdout
            for line in printed.splitlines():
                function, nanoseconds = line.split()
                times.setdefault(function, []).append(float(nanoseconds))

        return run

    others = {name: runs(name) for name in LEVELS if missing[name] is None}
    in_turns_with(benchmark, runs(SUBJECT), others, ROUNDS)
    benchmark.extra_info.update(
        compiler=building.version_of(str(building.compiler())).splitlines()[0],
        absent={name: reason for name, reason in missing.items() if reason is not None},
        nanoseconds={
            name: {function: statistics.median(values) for function, values in times.items()}
            for name, times in by_processor.items()
        },
    )
