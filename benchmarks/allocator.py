"""The same steps with an allocator that keeps freed memory, as in the other benchmarks, and with glibc's.

python -m benchmarks.allocator --write  # on a quiet machine; four minutes

Each kind of allocator has processes of its own, in turns, and in each process fastqt and plain PyTorch take
steps in turns.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch

import fastqt
from benchmarks.bench_gru import W, ragged_batch, torch_layer
from benchmarks.bench_gru import forward_and_backward as steps_of_layer
from benchmarks.measure.baselines import eager_contrastive_loss, window_matrix
from benchmarks.measure.kept_memory import memory_kept
from benchmarks.measure.machine import processor_and_versions
from benchmarks.measure.tables import table
from benchmarks.measure.timing import Clock
from benchmarks.measure.workloads import embeddings, forward_and_backward
from benchmarks.paths import RESULTS, ROOT
from fastqt.nn import GRU

STORED = RESULTS / "allocator.json"
KEPT, GIVEN_BACK = "kept", "given back"
PROCESSES, WARM_UPS, ROUNDS = 3, 2, 5
N, D = 8192, 768
H, B = 1000, 400

Steps = dict[str, Callable[[], Any]]  # of fastqt and of plain PyTorch


def loss() -> Steps:
    leaves, targets = embeddings(N, N, D=D), window_matrix(N, 1)
    return {
        "fastqt": forward_and_backward(lambda: fastqt.contrastive_loss(*leaves), *leaves),
        "PyTorch": forward_and_backward(lambda: eager_contrastive_loss(*leaves, targets), *leaves),
    }


def gru() -> Steps:
    layer, batch = GRU(W, H), ragged_batch(B)
    upstream = torch.randn(len(batch.data), H)
    return {
        "fastqt": steps_of_layer(layer, batch, upstream),
        "PyTorch": steps_of_layer(torch_layer(layer), batch, upstream),
    }


CASES = {f"the loss, N = {N:,}, D = {D}": loss, f"a GRU, H = {H:,}, B = {B}": gru}


def measured() -> dict[str, dict[str, list[float]]]:
    """The seconds of the steps of each case, in this process."""
    clock = Clock(torch.device("cpu"))
    by_case = {}
    for name, case in CASES.items():
        steps = case()
        seconds: dict[str, list[float]] = {who: [] for who in steps}
        for _ in range(WARM_UPS + ROUNDS):
            for who, step in steps.items():
                seconds[who].append(clock.seconds(step))
        by_case[name] = {who: times[WARM_UPS:] for who, times in seconds.items()}
    return by_case


def in_processes() -> list[dict[str, Any]]:
    """The median seconds of each case, by allocator."""
    runs: dict[str, list[Any]] = {KEPT: [], GIVEN_BACK: []}
    for _ in range(PROCESSES):
        for kind, several in runs.items():
            command = [sys.executable, "-m", "benchmarks.allocator", "--here", kind]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
            several.append(json.loads(done.stdout))
    return [
        {
            "case": case,
            "who": who,
            "seconds": {
                kind: statistics.median(second for run in several for second in run[case][who])
                for kind, several in runs.items()
            },
        }
        for case in CASES
        for who in ("fastqt", "PyTorch")
    ]


def allocator_table(rows: list[dict[str, Any]]) -> str:
    """What it costs that memory is given back."""
    lines = []
    for row in rows:
        kept, given_back = (row["seconds"][kind] for kind in (KEPT, GIVEN_BACK))
        lines.append([row["case"], row["who"], *(f"{1e3 * s:.1f}" for s in (kept, given_back))])
        lines[-1].append(f"{given_back / kept:.2f} ×")
    return table(("forward and backward", "by", "memory kept, ms", "memory given back, ms", "ratio"), lines)


def stored() -> dict[str, Any]:
    return json.loads(STORED.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.allocator", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"store {STORED.name}")
    parser.add_argument("--here", choices=(KEPT, GIVEN_BACK), help="measure in this process, and print JSON")
    options = parser.parse_args()
    if options.here is not None:
        with memory_kept() if options.here == KEPT else contextlib.nullcontext(True) as can:
            if not can:
                raise SystemExit("this system's malloc cannot be told to keep memory: want glibc's")
            print(json.dumps(measured()))
        return

    rows = in_processes()
    if options.write:
        here = processor_and_versions()
        run = {"machine_info": here, "datetime": here["date"], "found": rows}
        STORED.write_text(json.dumps(run, indent=1) + "\n")
    print(allocator_table(rows))


if __name__ == "__main__":
    main()
