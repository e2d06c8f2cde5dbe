"""Losses of a whole batch, and of recipes: ours, the formula with a matrix, and those of other libraries.

python -m benchmarks.peers_whole_batch              # measures and prints the tables; some minutes
python -m benchmarks.peers_whole_batch --write      # and stores the run, which the page renders
python -m benchmarks.peers_whole_batch --rows 512   # one size alone
python -m benchmarks.peers_whole_batch --write --only Triplet   # some losses anew, of a run of this machine

A step is the loss and its gradients. "matrix" is the formula of the paper in eager PyTorch, which makes all
N x N cells; "theirs" is the library's class of the installed version, and no class where it has none: that of
sentence-transformers, torch's F.linear_cross_entropy in chunks, and the SigLipLoss in chunks of open_clip,
which versions after 3.3.0 have. Errors are those of loss and gradients in float32, to the formula in float64,
for batches that a model has learnt.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import resource
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure.machine import processor_and_versions
from benchmarks.measure.tables import table
from benchmarks.measure.timing import Clock, Effort, Step, in_turns
from benchmarks.paths import RESULTS
from benchmarks.peers import MOST_MEMORY, OPEN_CLIP, step_of
from benchmarks.peers import versions as installed
from benchmarks.whole_batch import CASES, ROWS, Case, D, Loss

STORED = RESULTS / "peers-whole-batch.json"
ERROR_ROWS = 2048  # more than two for each column
MOST_CELLS = 2**26  # of a matrix in eager PyTorch, whose step keeps several of them
EFFORT = Effort(warm_ups=1, least_rounds=3, seconds=2.0)
SIDES = ("matrix", "theirs", "ours")


def steps_of(case: Case, N: int) -> dict[str, Callable[[Sequence[Tensor]], Step]]:
    """How each side's step is made from leaves; the matrix is left out where it is too large."""
    losses: dict[str, Callable[[], Loss]] = {"ours": lambda: case.ours}
    if N * N <= MOST_CELLS:
        losses["matrix"] = lambda: case.matrix
    if case.theirs is not None:
        losses["theirs"] = case.theirs
    return {name: partial(_step, losses[name]) for name in SIDES if name in losses}


def _step(make: Callable[[], Loss], leaves: Sequence[Tensor]) -> Step:
    return step_of(make(), leaves)


def measured(case: Case, N: int) -> dict[str, Any]:
    """Time and memory of all sides, in turns."""
    leaves = [x.requires_grad_() for x in case.inputs(N, False)]
    results = in_turns(steps_of(case, N), leaves, Clock(torch.device("cpu")), EFFORT)
    row: dict[str, Any] = {"case": case.label, "N": N}
    for name, result in results.items():
        kept = {"seconds": result.seconds, "peak_bytes": result.peak_bytes, "reason": result.reason}
        row[name] = {key: value for key, value in kept.items() if value is not None}
    return row


def errors(case: Case) -> dict[str, list[float] | str]:
    """The relative error of the loss, and that of all gradients together."""
    inputs = case.inputs(ERROR_ROWS, True)
    exact = [x.double().requires_grad_() for x in inputs]
    value, *gradients = step_of(case.matrix, exact)(0)
    wanted = value, torch.cat([x.flatten() for x in gradients])
    by_side: dict[str, list[float] | str] = {}
    for name, make in steps_of(case, ERROR_ROWS).items():
        try:
            value, *gradients = make([x.clone().requires_grad_() for x in inputs])(0)
        except ImportError as error:  # the peer is absent: the error is its result
            by_side[name] = str(error)
            continue
        pairs = zip((value, torch.cat([x.flatten() for x in gradients])), wanted, strict=True)
        by_side[name] = [float((x.double() - y).norm() / y.norm()) for x, y in pairs]
    return by_side


def stored() -> dict[str, Any]:
    return json.loads(STORED.read_text())


def speed_table(rows: Iterable[dict[str, Any]]) -> str:
    header = ("loss", "N", *(f"{side} ms" for side in SIDES), *(f"{side} MiB" for side in SIDES))

    def figure(row: dict[str, Any], side: str, key: str, unit: float, digits: int) -> str:
        value = row.get(side, {}).get(key)
        return "–" if value is None else f"{value / unit:,.{digits}f}"

    def line(row: dict[str, Any]) -> tuple[str, ...]:
        times = (figure(row, side, "seconds", 1e-3, 1) for side in SIDES)
        peaks = (figure(row, side, "peak_bytes", 2**20, 0) for side in SIDES)
        return row["case"], f"{row['N']:,}", *times, *peaks

    return table(header, map(line, rows))


def error_table(rows: Iterable[dict[str, Any]]) -> str:
    header = ("loss", *(f"{side}, {what}" for side in SIDES for what in ("loss", "gradients")))

    def line(row: dict[str, Any]) -> tuple[str, ...]:
        sides = (row.get(side) for side in SIDES)
        both = (x if isinstance(x, list) else (None, None) for x in sides)
        return row["case"], *("–" if x is None else f"{x:.1e}" for pair in both for x in pair)

    return table(header, map(line, rows))


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures losses of a whole batch beside their formulas.")
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS, help="the numbers of rows, N")
    parser.add_argument("--write", action="store_true", help=f"store {STORED.name}")
    parser.add_argument("--only", default="", help="the losses whose labels have this text")
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))

    versions = {"sentence-transformers": importlib.metadata.version("sentence-transformers")}
    versions[OPEN_CLIP.name] = installed()[OPEN_CLIP.name]
    run = {"machine_info": processor_and_versions(), "versions": versions, "D": D}
    others = others_of(run) if options.only and options.write else {"found": [], "errors": []}

    cases = [case for case in CASES if options.only in case.label]
    of_learnt = [{"case": case.label, **errors(case)} for case in cases]
    print(error_table(of_learnt), flush=True)
    rows = []
    for case in cases:
        for N in sorted(N for N in options.rows if case.most_rows >= N):
            rows.append(measured(case, N))
            print(json.dumps(rows[-1]), flush=True)
    if options.write:
        run |= {"found": joined(others["found"], rows), "errors": joined(others["errors"], of_learnt)}
        STORED.write_text(json.dumps(run, indent=1) + "\n")
    print(speed_table(rows))


def others_of(run: dict[str, Any]) -> dict[str, Any]:
    """The stored run, if it is of the same machine and versions; otherwise nothing can be added to it."""
    of_machine, before = ({**each["machine_info"], "date": None} for each in (run, stored()))
    if of_machine != before or run["versions"] != stored()["versions"]:
        raise SystemExit(f"{STORED.name} is of another machine or of other versions: measure all losses")
    return stored()


def joined(stored_rows: list[dict[str, Any]], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows in the order of CASES; those of a case that is measured anew take the place of the stored ones."""
    anew = {row["case"] for row in rows}
    every = [row for row in stored_rows if row["case"] not in anew] + rows
    return [row for case in CASES for row in every if row["case"] == case.label]


if __name__ == "__main__":
    main()
