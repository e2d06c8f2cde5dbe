"""What the compiled kernels execute for each cell of the score matrix, counted by the emulator.

python -m benchmarks.counters                  # prints the table
python -m benchmarks.counters --out FILE       # stores the counts, in benchmarks/results/counters.json

A count is neither a time nor of a device: it says what is executed, and not what that costs. It is the same
on every machine, for the same version of Triton, so that a change can be held against the one before.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # before anything imports fastqt.kernels

import torch
import triton as triton_package

import fastqt
from tests.shared.emulated_losses import KEEP, Loss, bias, emulate, guided, maxsim

STORED = Path(__file__).parent / "results" / "counters.json"
PROBLEMS = {
    "softmax, bf16": Loss(N=256, M=256, D=128, options={**KEEP, "scale": 0.1}),
    "softmax, low, bf16": Loss(N=256, M=256, D=128, options={**KEEP, "scale": 0.1, "memory": "low"}),
    "cosines, bf16": Loss(N=256, M=256, D=128, options={**KEEP, "scale": 20.0, "normalize": True}),
    "sigmoid with biases, bf16": Loss(
        fastqt.sigmoid_loss, N=256, M=256, D=128, options={**KEEP, "scale": 0.1, "bias": bias}
    ),
    "softmax, bf16, D=300": Loss(N=256, M=256, D=300, copied=True, options={**KEEP, "scale": 0.1}),
    "softmax, bf16, D=300, no copies": Loss(N=256, M=256, D=300, options={**KEEP, "scale": 0.1}),
    "CLIP, bf16": Loss(fastqt.clip_loss, N=256, M=256, D=128, options={"scale": 20.0}),
    "CLIP, kept scores, bf16": Loss(fastqt.clip_loss, N=256, M=256, D=640, options={"scale": 20.0}),
    "guide, bf16": Loss(guided, N=256, M=256, options={"guide_dtype": "bfloat16"}),
    "guide, fp32": Loss(guided, N=256, M=256, options={"guide_dtype": "float32"}),
    "MaxSim, bf16": Loss(maxsim, N=80, M=1120, options={"scale": 0.3}),
}
ARCHS = (80, 90)
OF_CELLS = (
    "scores_kernel",
    "row_products_kernel",
    "above_kernel",
    "maxima_kernel",
)  # how the names of kernels end that compute every cell
CLASSES = {
    "tensor": r"mma|wgmma\.mma_async",
    "special": r"ex2|lg2|rcp|rsqrt|sqrt|tanh|div\.(approx|full)",
    "double": r".*\.f64$",
    "float": r"(add|sub|mul|fma|min|max|neg|abs)\..*f(16|32|16x2)$",
    "convert": r"cvt",
    "select": r"setp|selp|(and|or|not|xor)\.pred",
    "exchange": r"shfl|redux|vote|elect",
    "shared": r"(ld|st)\.shared|ldmatrix|stmatrix",
    "global": r"(ld|st|atom|red)\.|cp",
    "wait": r"bar|mbarrier|fence|membar|wgmma",
    "branch": r"bra|brx|ret",
    "move": r"mov",
    "integer": r".*\.[busB](16|32|64)$|prmt|bfe",
}


def class_of(opcode: str) -> str:
    return next((name for name, pattern in CLASSES.items() if re.match(pattern, opcode)), "other")


def per_cell(counts: Counter[str], cells: int) -> dict[str, float]:
    """Instructions of threads by their class, and what goes to and from memory, for each cell."""
    traffic = ("global sectors", "shared wavefronts")
    by_class: Counter[str] = Counter()
    for opcode, times in counts.items():
        if opcode not in traffic and not opcode.startswith("ld.param"):
            by_class[class_of(opcode)] += times
    figures = {"instructions": by_class.total(), **by_class, **{name: counts[name] for name in traffic}}
    return {name: round(count / cells, 4) for name, count in figures.items()}


def counted(name: str, arch: int) -> dict[str, dict[str, float]]:
    """The figures of each kernel of cells that a problem's loss and gradients launch."""
    loss = PROBLEMS[name]
    emulation, _ = emulate(loss, arch)
    return {
        kernel: per_cell(counts, loss.N * loss.M)
        for kernel, counts in emulation.executed.items()
        if kernel.endswith(OF_CELLS)
    }


def every_count() -> dict[str, Any]:
    counts = {name: {f"sm_{arch}": counted(name, arch) for arch in ARCHS} for name in PROBLEMS}
    return {"triton": triton_package.__version__, "per cell": counts}


def table(stored: dict[str, Any]) -> str:
    """A row a kernel."""
    wanted = ("instructions", "float", "special", "select", "shared wavefronts", "global sectors")
    lines = [f"| problem | GPU | kernel | {' | '.join(wanted)} |", f"|---|---|---|{'---:|' * len(wanted)}"]
    for problem, of_archs in stored["per cell"].items():
        for arch, kernels in of_archs.items():
            for kernel, figures in kernels.items():
                numbers = " | ".join(f"{figures.get(name, 0):.2f}" for name in wanted)
                lines.append(f"| {problem} | {arch} | `{kernel}` | {numbers} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="where the counts are stored as JSON")
    parser.add_argument(
        "--only", nargs=2, metavar=("PROBLEM", "ARCH"), help="print one problem's counts as JSON"
    )
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.only:
        print(json.dumps(counted(asked.only[0], int(asked.only[1]))))
    else:
        counts = every_count()
        if asked.out is not None:
            asked.out.write_text(json.dumps(counts, indent=1) + "\n")
        print(table(counts))
