"""With --benchmark a run of pytest ends with the tables that the documents show of what it has measured.

Each benchmark is watched: a run on a machine that was not quiet says so where it is stored, and is not
rendered.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from benchmarks.measure.machine import here
from benchmarks.measure.quiet import Watch
from benchmarks.measure.run_tables import Run, machine, tables_of

# What these measure beside fastqt is not installed with the extra `bench`.
NEEDED = {"bench_logistic.py": "sklearn"}
collect_ignore = [name for name, package in NEEDED.items() if find_spec(package) is None]


WATCH = Watch()


@pytest.fixture(autouse=True)
def _watched(request: pytest.FixtureRequest) -> Iterator[None]:
    watches = request.config.getoption("--benchmark")
    if watches:
        WATCH.probe()
    yield
    if watches:
        WATCH.probe()


def pytest_benchmark_update_json(
    config: pytest.Config, benchmarks: list, output_json: dict[str, Any]
) -> None:
    output_json["disturbed"] = WATCH.reasons()


def finished_run(config: pytest.Config) -> Run:
    """What the benchmarks of this session have recorded, as a stored run has it."""
    session: Any = getattr(config, "_benchmarksession", None)  # absent without pytest-benchmark
    done = [each for each in getattr(session, "benchmarks", ()) if each.stats.rounds]
    return {
        "machine_info": here(),
        "datetime": datetime.date.today().isoformat(),
        "benchmarks": [
            {"name": each.name, "extra_info": each.extra_info, "stats": {"median": each.stats.median}}
            for each in done
        ],
    }


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if not config.getoption("--benchmark"):
        return
    run = finished_run(config)
    for name, text in tables_of(run).items():
        terminalreporter.section(name)
        terminalreporter.write_line(text)
    if run["benchmarks"]:
        terminalreporter.write_line(f"\nMeasured on: {machine(run)}")
    for reason in WATCH.reasons():
        terminalreporter.write_line(f"Do not store this run, the machine was not quiet: {reason}.", red=True)
