"""The command line of `benchmarks.gpu_check`: runs the sections of a stage and stores what they find."""

from __future__ import annotations

import argparse
import datetime
import importlib
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path

from benchmarks.gpu.processes import Outcome, run_section
from benchmarks.gpu.report import Report
from benchmarks.gpu.sections import Options, Section, processors
from benchmarks.gpu.stages import MODULES, STAGES, Wave, importable_peers, waves
from benchmarks.measure.errors import words
from benchmarks.paths import RESULTS

DRY_PATIENCE = 10  # a dry run may take so many times as long: its processors are few, and interpret kernels
LEAST_SECONDS = 3.0  # a section for which less is left of its wave is not begun


def run(planned: Sequence[Wave], options: Options, report: Report) -> None:
    """Runs waves one after the other; the report is stored after each section."""
    for wave in planned:
        seconds = max(section.seconds for section in wave)
        end = time.monotonic() + seconds
        at_once = min(len(wave), 2 * processors())

        def timed(section: Section, end: float = end) -> Outcome:
            left = min(section.seconds, end - time.monotonic())
            if left < min(LEAST_SECONDS, section.seconds / 2):
                return Outcome(section.name, "out of time", "its wave had ended")
            return run_section(replace(section, seconds=left), options)

        begin = time.monotonic()
        with ThreadPoolExecutor(at_once) as pool:
            outcomes = []
            for future in as_completed([pool.submit(timed, section) for section in wave]):
                outcomes.append(future.result())
                report.add(outcomes[-1])
        failed = sum(outcome.status == "failed" for outcome in outcomes)
        name = wave[-1].name.split(",")[0]  # The first may be one that takes long, beside the others.
        told = f"{len(wave)} sections" if len(wave) > 1 else "1 section"
        print(
            f"{name}: {told} in {time.monotonic() - begin:.0f} s, {failed} failed",
            file=sys.stderr,
            flush=True,
        )


def patient(planned: Sequence[Wave]) -> list[Wave]:
    """The same waves with the limits of a dry run."""
    return [
        [
            replace(
                section,
                seconds=DRY_PATIENCE * section.seconds,
                quiet=None if section.quiet is None else DRY_PATIENCE * section.quiet,
            )
            for section in wave
        ]
        for wave in planned
    ]


def default_path(device: str, stage: str) -> Path:
    from benchmarks.measure.machine import slug

    return RESULTS / "gpu" / f"{slug(device)}-{datetime.date.today().isoformat()}-{stage}.json"


def no_device() -> str | None:
    """Why no GPU can be used; None if one can."""
    try:
        torch = importlib.import_module("torch")
        return None if torch.cuda.is_available() else "no CUDA device was found"
    except Exception as error:  # a torch that cannot be imported can raise anything
        return words(error)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check",
        description="Checks and measures fastqt on a GPU. benchmarks/gpu_check.py says what to run.",
    )
    parser.add_argument(
        "--stage", choices=STAGES, default="all", help="what to run; by default all but tuning"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="PATH",
        help="file for the JSON (default: one in benchmarks/results/gpu, and none of a dry run)",
    )
    parser.add_argument("--quick", action="store_true", help="bfloat16 alone, fewer cases and shapes")
    parser.add_argument(
        "--dry-run", action="store_true", help="tiny problems on a CPU, in Triton's interpreter"
    )
    return parser


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    parsed = parser.parse_args(arguments)

    options = Options(parsed.quick, parsed.dry_run)
    reason = None if options.dry_run else no_device()
    if reason is not None:
        parser.error(f"{reason}; --dry-run needs none")

    # The results of a dry run are not those of a GPU, so they have no default place.
    path = parsed.out
    if path is None and not options.dry_run:
        path = default_path(importlib.import_module("torch").cuda.get_device_name(), parsed.stage)
    report = Report(parsed.stage, options, path)

    present = importable_peers()
    if parsed.stage in ("all", "speed"):
        absent = {
            name: f"{module} is not installed" for name, module in MODULES.items() if name not in present
        }
        report.content["dropped"] = absent

    planned = waves(parsed.stage, options)
    run(patient(planned) if options.dry_run else planned, options, report)
    print(report.text())
    return 1 if report.failures else 0
