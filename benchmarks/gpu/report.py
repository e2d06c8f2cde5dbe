"""What `benchmarks.gpu_check` stores, and the short text that it prints of that."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.gpu.processes import Outcome, kept_output
from benchmarks.gpu.sections import Options, Record
from benchmarks.paths import ROOT

MOST_FAILURES = 8  # that are printed; all are stored
MOST_OF_A_LINE = 170  # characters, of a line of times; as the following
MOST_OF_A_FACT = 110
MOST_OF_A_FAILURE = 130
NO_TIMES = "times: none, because a dry run has those of an interpreter, which say nothing of a GPU"
TOLD_AT_LENGTH = 4  # failed checks of a section that are stored with their tracebacks


class Report:
    """The results of all sections, in the form in which they are stored."""

    def __init__(self, stage: str, options: Options, path: Path | None) -> None:
        self.path = path  # None stores nothing
        self.content: dict[str, Any] = {
            "stage": stage,
            "options": asdict(options),
            "machine": None,
            "dropped": {},  # what is not run, and why
            "sections": [],
            "checks": [],
            "benchmarks": [],
        }
        self.write()

    def add(self, outcome: Outcome) -> None:
        """Adds what a section found, and stores all."""
        content = self.content
        content["sections"].append(
            {
                "name": outcome.name,
                "status": outcome.status,
                "message": outcome.message,
                "seconds": round(outcome.seconds, 1),
                "output": kept_output(outcome),
            }
        )
        for record in self._shortened(outcome):
            kind, entry = record["kind"], {k: v for k, v in record.items() if k != "kind"}
            if kind == "machine":
                content["machine"] = entry
            else:
                content.setdefault(f"{kind}s", []).append({"section": outcome.name, **entry})
        self.write()

    def _shortened(self, outcome: Outcome) -> Iterator[Record]:
        """Its records; later failures mostly repeat the first ones, and tracebacks and kernels are long."""
        failed = 0
        for record in outcome.records:
            failed += record.get("ok") is False
            if failed > TOLD_AT_LENGTH:
                yield {name: x for name, x in record.items() if name not in ("traceback", "evidence")}
            else:
                yield record

    def write(self) -> None:
        """Stores all; who reads the file meanwhile finds the version before or this one, never a part.

        Paths begin at the checkout, since where it lies says more of the machine's owner than of the machine.
        """
        if self.path is None:
            return

        text = json.dumps(self.content, indent=1).replace(str(ROOT), ".")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        beside.write_text(text + "\n")
        beside.replace(self.path)

    @property
    def failures(self) -> list[str]:
        content = self.content
        failed = [
            f"{c['section']}: {c['name']}: {c['detail']}" for c in content["checks"] if c["ok"] is False
        ]
        ended = [f"{s['name']}: {s['message']}" for s in content["sections"] if s["status"] == "failed"]
        return failed + ended

    def text(self) -> str:
        """At most 100 lines, whatever there is to say; the file has everything."""
        content = self.content
        facts = (content["machine"] or {}).items()
        lines = [f"{name:<12} {_flat(value)}"[:MOST_OF_A_FACT] for name, value in facts]
        header = ("section", "seconds", "passed", "failed", "not told", "end")
        lines += ["", *columns(header, self._sections())]
        lines += [f"not run: {name}: {reason}" for name, reason in content["dropped"].items()]
        lines += [NO_TIMES] if content["options"]["dry_run"] else self._times()
        failures = self.failures
        lines += ["", f"{len(failures)} failed" if failures else "nothing failed"]
        for failure in failures[:MOST_FAILURES]:
            lines += [line[:MOST_OF_A_FAILURE] for line in telling(failure.strip().splitlines())]
        more = len(failures) - MOST_FAILURES
        where = "--out PATH stores them" if self.path is None else f"in {self.path.name}"
        lines += [f"and {more} more, {where}"] if more > 0 else []
        return "\n".join(line[:MOST_OF_A_LINE].rstrip() for line in lines)

    def _times(self) -> list[str]:
        """What was measured: times, products, profiles, and the ends of tunings."""
        content = self.content
        lines = [""] if content["benchmarks"] else []
        lines += time_lines(content["benchmarks"])
        lines += product_lines(content.get("products", []))
        lines += profile_lines(content.get("profiles", []))
        return lines + [line for tuning in content.get("tunings", []) for line in tuning["output"][-8:]]

    def _sections(self) -> Iterator[tuple[str, ...]]:
        """A row for each kind of section: those that differ in what follows a comma are added up."""
        groups: dict[str, list[dict[str, Any]]] = {}
        for section in self.content["sections"]:
            groups.setdefault(section["name"].split(",")[0], []).append(section)
        for name, group in groups.items():
            names = {section["name"] for section in group}
            verdicts = [c["ok"] for c in self.content["checks"] if c["section"] in names]
            counts = (str(sum(v is wanted for v in verdicts)) for wanted in (True, False, None))
            ends = [s for s in group if s["status"] != "done"]
            end = f"{ends[0]['status']}: {ends[0]['message']}" if ends else "done"
            seconds = max(section["seconds"] for section in group)
            shown = name if len(group) == 1 else f"{name} ({len(group)})"
            yield (shown, f"{seconds:.0f}", *counts, end.splitlines()[0][:60])


def telling(lines: list[str]) -> list[str]:
    """The lines of an error that say most: the first, the next that speaks of an error, and the last."""
    first, *others = lines
    named = [line for line in others if "error" in line.lower()]
    chosen = dict.fromkeys([*named[:1], *others[-1:]])  # each once
    return [first, *(f"    {line.strip()}" for line in chosen)]


def time_lines(rows: Iterable[dict[str, Any]]) -> list[str]:
    """A line for each shape: the time of the three products, and every contestant's as a multiple of it."""
    shapes: dict[tuple[str, bool], dict[str, list[str]]] = {}
    for row in rows:
        shape = shapes.setdefault((row["shape"], row["graphed"]), {"gemm": [], "others": []})
        if row["contestant"] == "GEMMs":
            shape["gemm"] = [_milliseconds(row["seconds"])]
        else:
            shape["others"].append(_beside_products(row))
    return [
        f"{name}{' graph' if graphed else ''}: GEMMs {' '.join(seconds['gemm']) or '–'}; "
        + ", ".join(seconds["others"])
        for (name, graphed), seconds in shapes.items()
    ]


def _beside_products(row: dict[str, Any]) -> str:
    name = row["contestant"]
    if row["seconds"] is None:
        return f"{name} –"
    if row["ratio_to_gemm"] is None:
        return f"{name} {_milliseconds(row['seconds'])}"
    predicted = row["predicted_ratio"]
    told = "" if predicted is None else f" (predicted {predicted:.2f})"
    return f"{name} {row['ratio_to_gemm']:.2f}×{told}"


def product_lines(products: Iterable[dict[str, Any]]) -> list[str]:
    """A line for each product of the vendor's library: its time, its rate and its longest kernel."""
    return [
        f"{p['name']}: {_milliseconds(p['seconds'])}, {p['tflops']:.0f} TFLOP/s, "
        + (p["kernels"][0]["name"] if p["kernels"] else str(p["reason"]))
        for p in products
    ]


def profile_lines(profiles: Iterable[dict[str, Any]]) -> list[str]:
    """A line for each step: the time of its kernels, of launching them, and of the longest."""
    lines = []
    for p in profiles:
        longest = (
            f"{_milliseconds(k['seconds'])} in {k['count']:.0f} × {k['name'][:40]}" for k in p["kernels"][:2]
        )
        told = ", ".join(longest) or str(p["reason"])
        lines.append(
            f"{p['shape']}, {p['memory']}: {p['launches']:.0f} kernels {_milliseconds(p['kernel_seconds'])}, "
            f"launched in {_milliseconds(p['seconds_to_launch'])}; {told}"
        )
    return lines


def _flat(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_flat(x)}" for name, x in value.items())
    return "–" if value is None else " ".join(str(value).split())


def _milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:,.3f} ms"


def columns(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Lines of a table: the first column flush left, numbers flush right, the last column as it is."""
    table = [header, *rows]
    widths = [max(len(row[k]) for row in table) for k in range(len(header))]
    last = len(header) - 1

    def line(row: tuple[str, ...]) -> str:
        cells = (
            cell.ljust(widths[k]) if k in (0, last) else cell.rjust(widths[k]) for k, cell in enumerate(row)
        )
        return "  ".join(cells).rstrip()

    return [line(row) for row in table]
