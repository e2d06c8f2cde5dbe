"""The lines with which README begins: two of plain PyTorch, alone and in a block, and our call.

python -m benchmarks.headline --write              # on a quiet machine; five minutes
python -m benchmarks.headline --write headline-intel

Times are medians of steps in turns, in one process that keeps freed memory. The memory of each program is
that of a process of its own, which does not.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import torch
import torch.nn.functional as F

import fastqt
from benchmarks.measure.kept_memory import memory_kept
from benchmarks.measure.machine import here
from benchmarks.measure.quiet import Watch
from benchmarks.measure.tables import table
from benchmarks.measure.timing import Clock
from benchmarks.measure.workloads import embeddings, forward_and_backward, peak_above_gradients
from benchmarks.paths import RESULTS, ROOT
from fastqt.machine.memory import mebibytes

README = ROOT / "README.md"
STORED = RESULTS / "headline.json"
ROWS, WIDTH = (1024, 2048, 4096, 8192, 16384), 768
TEMPERATURE = 0.05
PLAIN, OURS, BLOCK = "plain PyTorch", "fastqt", "in the block"


def programs(page: Path = README) -> dict[str, str]:
    """The lines that README prints, each program up to its `loss`."""
    first, second = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)[:2]
    block = "".join(line for line in first.splitlines(keepends=True) if line.startswith(("with ", " ")))
    written = {PLAIN: dedent(block.partition("\n")[2]), BLOCK: block, OURS: second}
    missing = [name for name, lines in written.items() if "loss = " not in lines]
    if missing:
        raise ValueError(f"{page.name}: the first blocks of Python have no loss of {', '.join(missing)}")
    return written


def losses(queries: torch.Tensor, candidates: torch.Tensor) -> dict[str, Callable[[], torch.Tensor]]:
    """Each program as a function that returns its loss."""

    def of(lines: str) -> Callable[[], torch.Tensor]:
        code = compile(lines, README.name, "exec")

        def loss() -> torch.Tensor:
            names: dict[str, Any] = {"queries": queries, "candidates": candidates, "temperature": TEMPERATURE}
            names |= {"F": F, "torch": torch, "fastqt": fastqt}
            exec(code, names)
            return names["loss"]

        return loss

    return {name: of(lines) for name, lines in programs().items()}


def peak(name: str, rows: int) -> int | None:
    """The bytes of one program beside inputs and gradients, of this process, which has computed a little."""
    for size in (min(rows, 256), rows):
        leaves = embeddings(size, size, D=WIDTH)
        step = forward_and_backward(losses(*leaves)[name], *leaves)
        taken = peak_above_gradients(step, leaves)
    return taken


def peaks(rows: int) -> dict[str, int | None]:
    """The same in a process of its own for each program."""

    def asked(name: str) -> int | None:
        command = [sys.executable, "-m", "benchmarks.headline", "--peak", name, str(rows)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        return json.loads(done.stdout)

    return {name: asked(name) for name in programs()}


def seconds(rows: int) -> dict[str, float]:
    """The median seconds of a step of each program, in turns."""
    leaves = embeddings(rows, rows, D=WIDTH)
    steps = {name: forward_and_backward(loss, *leaves) for name, loss in losses(*leaves).items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    rounds = max(3, min(40, int(3e11 / (rows * rows * WIDTH))))
    clock = Clock(torch.device("cpu"))
    with memory_kept():
        for turn in range(rounds + 1):
            for name in sorted(steps, reverse=turn % 2 == 1):
                times[name].append(clock.seconds(steps[name]))
    return {name: statistics.median(each[1:]) for name, each in times.items()}


def stored() -> dict[str, Any]:
    return json.loads(STORED.read_text())


def batches_table(batches: list[dict[str, Any]]) -> str:
    """Memory first, then time."""
    names = (OURS, BLOCK, PLAIN)

    def row(each: dict[str, Any]) -> tuple[str, ...]:
        times = (each["seconds"][name] for name in names)
        return (
            f"{each['rows']:,}",
            *(mebibytes(each["peaks"][name]) for name in names),
            *(f"{time:.{1 if time >= 1 else 2}f}" for time in times),
        )

    header = ("rows N", *(f"{name} {unit}" for unit in ("MiB", "s") for name in names))
    return table(header, map(row, batches))


def largest_sentence(run: dict[str, Any]) -> str:
    """Memory and time of the largest batch."""
    most = run["batches"][-1]
    threads = run["machine_info"]["threads"]
    plain, block = (f"{mebibytes(most['peaks'][name])} MiB" for name in (PLAIN, BLOCK))
    return (
        f"On a CPU with {threads} threads, with N = {most['rows']:,} rows of width D = {WIDTH:,}, two lines "
        f"of plain PyTorch, InfoNCE and its gradients, took {plain} beside inputs and gradients, and "
        f"{most['seconds'][PLAIN]:.1f} s. In a block of `fastqt.fused()` the same lines took {block} and "
        f"{most['seconds'][BLOCK]:.1f} s."
    )


def times_sentence(run: dict[str, Any]) -> str:
    """The times of a second machine, whose memory is that of the first."""
    batches = [each for each in run["batches"] if each["rows"] >= 2048]

    def listed(figures: list[str]) -> str:
        return f"{', '.join(figures[:-1])} and {figures[-1]}"

    def times(name: str) -> str:
        seconds = [each["seconds"][name] for each in batches]
        return listed([f"{time:.{1 if time >= 1 else 2}f}" for time in seconds])

    return (
        f"On an {run['machine_info']['cpu']}, whose products are those of MKL, "
        f"{listed([format(each['rows'], ',') for each in batches])} rows took fastqt {times(OURS)} s, "
        f"the block {times(BLOCK)} s, and plain PyTorch {times(PLAIN)} s."
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.headline", description=__doc__)
    parser.add_argument(
        "--write", nargs="?", const=STORED.stem, metavar="NAME", help="store results/NAME.json"
    )
    parser.add_argument("--peak", nargs=2, metavar=("PROGRAM", "N"), help="print the bytes of one program")
    options = parser.parse_args()
    if options.peak is not None:
        name, rows = options.peak
        print(json.dumps(peak(name, int(rows))))
        return

    watch = Watch()
    batches = []
    for rows in ROWS:
        watch.probe()
        batches.append({"rows": rows, "peaks": peaks(rows), "seconds": seconds(rows)})
    watch.probe()
    print(batches_table(batches))
    if options.write is not None:
        today = datetime.date.today().isoformat()
        run = {"machine_info": here(), "datetime": today, "disturbed": watch.reasons(), "batches": batches}
        (RESULTS / f"{options.write}.json").write_text(json.dumps(run, indent=1) + "\n")


if __name__ == "__main__":
    main()
