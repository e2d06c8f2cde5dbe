"""Trainings in bfloat16 beside trainings in float32: how far their curves are apart, and how fast they are.

python -m benchmarks.precision --write          # the curves of three models from several seeds; half an hour
python -m benchmarks.precision --speed --write  # sentences a second, in turns; on a quiet machine

A curve is the mean loss of 50 steps at a time, 500 steps long. All trainings of a model see the same batches.
Two precisions from one seed differ by rounding alone; two seeds differ in their first weights and in dropout.
The speeds are those of larger models, whose time is that of products.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.measure.machine import processor_and_versions
from benchmarks.measure.tables import table
from benchmarks.paths import RESULTS, ROOT

STORED = RESULTS / "precision.json"
STEPS, WINDOW = 500, 50
SEEDS = {"bag of words": 3, "GRU, 300 units": 8, "Transformer, 2 layers": 3}  # a GRU's precisions differ most
PRECISIONS = ("float32", "bfloat16")
CURVES = {
    "bag of words": "--encoder bow --batch-size 400",
    "GRU, 300 units": "--encoder gru --hidden-size 300 --batch-size 100",
    "Transformer, 2 layers": "--encoder transformer --layers 2 --word-dim 128 --heads 4 --feedforward 512 "
    "--batch-size 64",
}
SPEEDS = {
    "bag of words": "--encoder bow",
    "GRU, 300 units": "--encoder gru --hidden-size 300",
    "GRU, 1,000 units": "--encoder gru --hidden-size 1000",
    "Transformer, 6 layers": "--encoder transformer --batch-size 128",
}
SPEED_STEPS, WARM_UP, ROUNDS = 8, 3, 2

Curve: TypeAlias = list[float]


def metrics_of(corpus: Path, options: Sequence[str]) -> list[dict[str, float]]:
    """What a training reports at each step."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["train", str(corpus), *options, "--report-every", "1", "--out", folder]
        done = subprocess.run(
            [sys.executable, "-m", "fastqt", *words],
            cwd=ROOT,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"fastqt train ended with status {done.returncode}: {done.stderr[-2000:]}")
        return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def curve(corpus: Path, options: Sequence[str], precision: str, seed: int) -> Curve:
    """The mean losses of the windows of a training."""
    steps = ("--steps", str(STEPS), "--precision", precision, "--seed", str(seed))
    losses = [line["loss"] for line in metrics_of(corpus, [*options, *steps])]
    return [statistics.fmean(losses[at : at + WINDOW]) for at in range(0, STEPS, WINDOW)]


def curves(corpus: Path) -> list[dict[str, Any]]:
    """The curves of all models, by precision and seed."""
    rows = []
    for model, line in CURVES.items():
        options = line.split()
        losses = {
            precision: [curve(corpus, options, precision, seed) for seed in range(SEEDS[model])]
            for precision in PRECISIONS
        }
        rows.append({"model": model, "options": options, "losses": losses})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def speeds(corpus: Path) -> list[dict[str, Any]]:
    """Medians of sentences a second, of trainings in turns."""
    rows = []
    for model, line in SPEEDS.items():
        options = line.split()
        rates: dict[str, list[float]] = {precision: [] for precision in PRECISIONS}
        for _ in range(ROUNDS):
            for precision in PRECISIONS:
                steps = ("--steps", str(SPEED_STEPS), "--precision", precision)
                reports = metrics_of(corpus, [*options, *steps])[WARM_UP:]
                rates[precision] += [report["sentences_per_second"] for report in reports]
        medians = {precision: statistics.median(each) for precision, each in rates.items()}
        rows.append({"model": model, "options": options, "sentences_per_second": medians})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def largest_difference(pairs: Sequence[tuple[Curve, Curve]]) -> float:
    """Of the losses of any window of two curves."""
    return max(abs(a - b) for pair in pairs for a, b in zip(*pair, strict=True))


def mean_and_error(differences: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error."""
    return statistics.fmean(differences), statistics.stdev(differences) / len(differences) ** 0.5


def curves_table(rows: Sequence[dict[str, Any]]) -> str:
    """What the precision changes of each model's curve, beside what the seed changes."""
    lines = []
    for row in rows:
        of_float32, of_bfloat16 = (row["losses"][precision] for precision in PRECISIONS)
        last = [[x[-1] for x in several] for several in (of_float32, of_bfloat16)]
        mean, error = mean_and_error([b - a for a, b in zip(*last, strict=True)])
        of_precision = largest_difference(list(zip(of_float32, of_bfloat16, strict=True)))
        of_seed = largest_difference(list(combinations(of_float32, 2)))
        figures = (f"{x:.4f}" for x in (*map(statistics.fmean, last), of_precision, of_seed))
        lines.append(
            [row["model"], str(len(of_float32)), *figures, f"{round(mean, 4) + 0.0:+.4f} ± {error:.4f}"]
        )
    losses = "last loss, float32", "last loss, bfloat16"
    differences = "largest difference of precisions", "largest difference of seeds"
    mean = "mean difference of the last losses"
    return table(("model", "seeds", *losses, *differences, mean), lines)


def speeds_table(rows: Sequence[dict[str, Any]]) -> str:
    """Sentences a second in both precisions."""
    lines = []
    for row in rows:
        of_float32, of_bfloat16 = (row["sentences_per_second"][precision] for precision in PRECISIONS)
        ratio = f"{of_bfloat16 / of_float32:.2f} ×"
        lines.append([row["model"], f"{of_float32:,.0f}", f"{of_bfloat16:,.0f}", ratio])
    return table(("model", "float32, sentences a second", "bfloat16", "ratio"), lines)


def stored() -> dict[str, Any]:
    """The stored runs: "curves" and "speeds"."""
    return json.loads(STORED.read_text()) if STORED.exists() else {}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.precision", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"store {STORED.name}")
    parser.add_argument("--speed", action="store_true", help="sentences a second instead")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data", metavar="DIR")
    options = parser.parse_args()

    corpus = options.data / "corpus" / "train.txt.xz"
    kind, rows = ("speeds", speeds(corpus)) if options.speed else ("curves", curves(corpus))
    if options.write:
        here = processor_and_versions()
        run = {"machine_info": here, "datetime": here["date"], "found": rows}
        STORED.write_text(json.dumps(stored() | {kind: run}, indent=1) + "\n")
    print((speeds_table if options.speed else curves_table)(rows))


if __name__ == "__main__":
    main()
