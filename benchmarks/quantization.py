"""Trainings for quantised vectors beside trainings without: nDCG@10 of float32, int8 and binary vectors.

python -m benchmarks.quantization --write   # three seeds of each; ten minutes

A bag of words learns from pairs of sentences of the STS tasks, MRPC and SICK that mean the same. Queries and
documents are those of other pairs: a query's document is among the sentences of all of these. No text of them
is in the pairs that are trained on. The trainings have the same batches, and steps enough that more of them
change little.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

import fastqt
from benchmarks.measure.machine import processor_and_versions
from benchmarks.measure.tables import table
from benchmarks.paths import RESULTS, ROOT
from fastqt.sentences.evaluation.judged import JudgedSet
from fastqt.sentences.inference.encoder import SentenceEncoder

STORED = RESULTS / "quantization.json"
SEEDS = range(3)
OPTIONS = "--model pairs --epochs 30 --batch-size 128"
WIDTHS = (64, 300)
# What is added to the loss of the vectors as they are.
TRAININGS = {"nothing": "", "int8": "int8", "binary": "binary", "int8 and binary": "int8,binary"}
VECTORS = ("float32", "int8", "binary")
# Folder, files, the column of the score and the least one of a pair that means the same.
TRAINED = (
    *((f"STS/STS{year}", 1, 4.0) for year in (12, 13, 14, 15)),
    ("STSB/train", 1, 4.0),
    ("MRPC/train", 0, 1.0),
    ("SICK/train", 0, 4.0),
)
HELD_OUT = (("STSB/dev", 1, 4.0), ("STSB/test", 1, 4.0), ("MRPC/test", 0, 1.0), ("SICK/test", 0, 4.0))
SENTENCES = {"STS": (2, 3), "STSB": (2, 3), "MRPC": (3, 4), "SICK": (1, 2)}  # their columns

Pair: TypeAlias = tuple[str, str]


def pairs_of(data: Path, files: tuple[tuple[str, int, float], ...]) -> Iterator[Pair]:
    """The pairs of sentences that mean the same, without those of one sentence twice."""
    for name, column, least in files:
        first, second = SENTENCES[name.partition("/")[0]]
        with lzma.open(data / "eval" / f"{name}.tsv.xz", "rt", encoding="utf-8") as lines:
            for line in lines:
                cells = line.rstrip("\n").split("\t")
                pair = " ".join(cells[first].split()), " ".join(cells[second].split())
                if float(cells[column]) >= least and pair[0] != pair[1]:
                    yield pair


def judged_set(pairs: set[Pair]) -> JudgedSet:
    """The first sentences of pairs as queries, and all sentences as documents."""
    documents = {text: text for text in sorted({text for pair in pairs for text in pair})}
    qrels: dict[str, dict[str, int]] = {}
    for query, document in sorted(pairs):
        qrels.setdefault(query, {})[document] = 1
    return JudgedSet({query: query for query in qrels}, documents, qrels)


def trained(pairs: Path, width: int, quantize: str, seed: int, out: Path) -> SentenceEncoder:
    """The encoder of a training."""
    words = [*OPTIONS.split(), "--word-dim", str(width), "--seed", str(seed), "--out", str(out)]
    words += ["--quantize", quantize] if quantize else []
    done = subprocess.run(
        [sys.executable, "-m", "fastqt", "train", str(pairs), *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"fastqt train ended with status {done.returncode}: {done.stderr[-2000:]}")
    return SentenceEncoder.load(out)


def ndcg(encoder: SentenceEncoder, held_out: JudgedSet) -> dict[str, float]:
    """nDCG@10 of each kind of vectors; the ranges of int8 are those of the documents."""
    documents = list(held_out.documents)
    ranges = fastqt.quantization_ranges(torch.from_numpy(encoder.encode(documents, side="document")))
    figures = {}
    for kind in VECTORS:

        def vectors(texts: list[str], kind: str = kind) -> NDArray[np.float32]:
            x = torch.from_numpy(encoder.encode(texts))
            if kind == "int8":
                x = fastqt.quantized(x, "int8", ranges)
            elif kind == "binary":
                x = fastqt.quantized(x, "binary")
            return x.numpy()

        figures[kind] = held_out.evaluate(vectors, None)["nDCG@10"]
    return figures


def measured(data: Path) -> list[dict[str, Any]]:
    """The figures of all trainings, by width and by what is added."""
    held_out = set(pairs_of(data, HELD_OUT))
    texts = {text.lower() for pair in held_out for text in pair}
    pairs = sorted(p for p in set(pairs_of(data, TRAINED)) if not texts.intersection(map(str.lower, p)))
    judged = judged_set(held_out)
    sizes = {"pairs": len(pairs), "queries": len(judged.queries), "documents": len(judged.documents)}

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "pairs.tsv"
        file.write_text("".join(f"{a}\t{b}\n" for a, b in pairs), encoding="utf-8")
        for width in WIDTHS:
            for name, quantize in TRAININGS.items():
                runs = [Path(folder) / f"{width}-{quantize}-{seed}" for seed in SEEDS]
                figures = [
                    ndcg(trained(file, width, quantize, seed, run), judged)
                    for seed, run in zip(SEEDS, runs, strict=True)
                ]
                options = f"{OPTIONS} --word-dim {width}" + (f" --quantize {quantize}" if quantize else "")
                row = {"width": width, "added": name, "options": options, **sizes, "nDCG@10": figures}
                rows.append(row)
                print(json.dumps(row), flush=True)
    return rows


def ndcg_table(rows: list[dict[str, Any]]) -> str:
    """The mean over the seeds for each kind of vectors, and its distance from that of the first training."""
    lines, plain = [], {}
    for row in rows:
        cells = [str(row["width"]), row["added"]]
        for kind in VECTORS:
            figures = [100 * each[kind] for each in row["nDCG@10"]]
            mean = statistics.fmean(figures)
            if row["added"] == "nothing":
                plain[kind] = figures
                cells.append(f"{mean:.1f}")
                continue
            gains = [b - a for a, b in zip(plain[kind], figures, strict=True)]
            error = statistics.stdev(gains) / len(gains) ** 0.5
            cells.append(f"{mean:.1f} ({statistics.fmean(gains):+.2f} ± {error:.2f})")
        lines.append(cells)
    return table(("dimensions", "losses that are added", *VECTORS), lines)


def sizes_sentence(rows: list[dict[str, Any]]) -> str:
    """How many pairs were trained on, and what was searched."""
    row = rows[0]
    return (
        f"{row['pairs']:,} pairs are trained on; {row['queries']:,} other sentences are queries, and "
        f"{row['documents']:,} are documents."
    )


def stored() -> dict[str, Any]:
    """The stored run."""
    run: dict[str, Any] = json.loads(STORED.read_text())
    return run


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quantization", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"store {STORED.name}")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data", metavar="DIR")
    options = parser.parse_args()

    rows = measured(options.data)
    if options.write:
        here = processor_and_versions()
        run = {"machine_info": here, "datetime": here["date"], "found": rows}
        STORED.write_text(json.dumps(run, indent=1) + "\n")
    print(ndcg_table(rows))


if __name__ == "__main__":
    main()
