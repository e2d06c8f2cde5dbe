"""Checks and measures fastqt on a GPU in under 8 minutes: are its results right, and how fast is it.

python -m benchmarks.gpu_check                        # prints a table, stores benchmarks/results/gpu/*.json
python -m benchmarks.gpu_check --quick --out run.json
python -m benchmarks.gpu_check --dry-run --out run.json   # on a CPU: tiny shapes, Triton's interpreter

Each section runs in its own process within a time limit and writes its results line by line. A kernel that
hangs or breaks the device therefore costs no more than its own section. The exit status is 1 if a check or a
section failed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.behaviour import behaviour
from benchmarks.gpu.correctness import accuracy, cases
from benchmarks.gpu.figures import HEADER, benchmark, cells, compiled, fused_and_eager
from benchmarks.gpu.peers import PEERS
from benchmarks.gpu.sanitizer import SANITIZED, sanitizer
from benchmarks.gpu.sections import (
    MEMORY,
    Options,
    Outcome,
    Record,
    Section,
    run_section,
    write_lines,
)
from benchmarks.measure.machine import machine, slug
from benchmarks.paths import RESULTS

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def waves(options: Options) -> list[list[Section]]:
    """The sections in their order. Those of one wave run at once; those that measure times run alone."""
    engines = {memory: {"memory": memory} for memory in MEMORY}
    engines["one launch"] = {"memory": "fast", "backend": "cuda"}
    checks = [
        Section(
            f"{name}, {str(dtype).removeprefix('torch.')}, {engine}", 160, partial(run, dtype=dtype, **chosen)
        )
        for name, run in (("cases", cases), ("accuracy", accuracy))
        for dtype in ((torch.bfloat16,) if options.quick else DTYPES)
        for engine, chosen in engines.items()
    ]
    if options.dry_run:
        checks = [checks[0], checks[-2]]
    return [
        [Section("machine", 20, _machine)],
        [*checks, Section("behaviour", 160, behaviour), Section("sanitizer", 195, sanitizer)],
        [Section("benchmark", 80, partial(benchmark, contestants=fused_and_eager))],
        [Section("graphs", 40, partial(benchmark, contestants=fused_and_eager, graphed=True))],
        [Section("peers", 60, partial(benchmark, contestants=lambda _: PEERS))],
        [Section("compiled", 50, partial(benchmark, contestants=compiled, smallest_first=True))],
    ]


def _machine(options: Options) -> Iterator[Record]:
    yield {"kind": "machine", **machine(options.device)}


def find_section(name: str, options: Options) -> Section:
    return next(s for wave in [*waves(options), [SANITIZED]] for s in wave if s.name == name)


class Report:
    """The results of all sections, in the form in which they are stored."""

    def __init__(self, options: Options, path: Path | None) -> None:
        self.path = path
        self.content: dict[str, Any] = {
            "options": asdict(options),
            "machine": None,
            "sections": [],
            "checks": [],
            "benchmarks": [],
        }

    def add(self, outcome: Outcome) -> None:
        content = self.content
        content["sections"].append(
            {
                "name": outcome.name,
                "status": outcome.status,
                "message": outcome.message,
                "seconds": round(outcome.seconds, 1),
            }
        )
        for record in outcome.records:
            kind, entry = record["kind"], {k: v for k, v in record.items() if k != "kind"}
            if kind == "machine":
                content["machine"] = entry
            else:
                content[f"{kind}s"].append({"section": outcome.name, **entry})
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(content, indent=1) + "\n")

    @property
    def failures(self) -> list[str]:
        content = self.content
        failed = [
            f"{c['section']}: {c['name']}: {c['detail']}" for c in content["checks"] if c["ok"] is False
        ]
        ended = [f"{s['name']}: {s['message']}" for s in content["sections"] if s["status"] == "failed"]
        return failed + ended

    def text(self) -> str:
        content = self.content
        lines = [f"{name:<13} {value}" for name, value in (content["machine"] or {}).items()]
        lines += [
            "",
            *columns(("section", "seconds", "passed", "failed", "not told", "end"), self._sections()),
        ]
        lines += ["", *columns(HEADER, map(cells, content["benchmarks"]))]
        failures = self.failures
        lines += ["", f"{len(failures)} failed" if failures else "nothing failed", *failures]
        return "\n".join(lines)

    def _sections(self) -> Iterator[tuple[str, ...]]:
        for section in self.content["sections"]:
            verdicts = [c["ok"] for c in self.content["checks"] if c["section"] == section["name"]]
            counts = (str(sum(v is wanted for v in verdicts)) for wanted in (True, False, None))
            end = f"{section['status']} {section['message']}".strip()
            yield (section["name"], f"{section['seconds']:.0f}", *counts, end[:60])


def columns(header: tuple[str, ...], rows: Any) -> list[str]:
    """Lines of a table: the first two columns flush left, numbers flush right, the last column as it is."""
    table = [header, *rows]
    widths = [max(len(row[k]) for row in table) for k in range(len(header))]
    last = len(header) - 1

    def line(row: tuple[str, ...]) -> str:
        cells = (
            cell.ljust(widths[k]) if k < 2 or k == last else cell.rjust(widths[k])
            for k, cell in enumerate(row)
        )
        return "  ".join(cells).rstrip()

    return [line(row) for row in table]


def default_path() -> Path:
    device = slug(torch.cuda.get_device_name())
    return RESULTS / "gpu" / f"{device}-{datetime.date.today().isoformat()}.json"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--out", type=Path, metavar="PATH", help="file for the JSON")
    parser.add_argument("--quick", action="store_true", help="bfloat16 alone, fewer cases and shapes")
    parser.add_argument(
        "--dry-run", action="store_true", help="tiny problems on a CPU, in Triton's interpreter"
    )
    parser.add_argument("--section", help=argparse.SUPPRESS)
    parser.add_argument("--lines", type=Path, help=argparse.SUPPRESS)
    return parser


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    given = parser.parse_args(arguments)
    options = Options(given.quick, given.dry_run)
    if given.section is not None:
        write_lines(find_section(given.section, options), options, given.lines)
        return 0
    if options.dry_run and given.out is None:
        parser.error(
            "--dry-run wants --out: its results are not those of a GPU, so they have no default place"
        )
    if not options.dry_run and not torch.cuda.is_available():
        parser.error("no CUDA device was found; --dry-run needs none")
    if find_spec("fastqt.kernels") is None:
        parser.error("fastqt is not installed: pip install --no-build-isolation --editable .")
    report = Report(options, given.out or default_path())
    at_once = len(os.sched_getaffinity(0))
    for wave in waves(options):
        with ThreadPoolExecutor(min(at_once, len(wave))) as pool:
            for future in as_completed(pool.submit(run_section, section, options) for section in wave):
                outcome = future.result()
                print(
                    f"{outcome.name}: {outcome.status} in {outcome.seconds:.0f} s",
                    file=sys.stderr,
                    flush=True,
                )
                report.add(outcome)
    print(report.text())
    return 1 if report.failures else 0
