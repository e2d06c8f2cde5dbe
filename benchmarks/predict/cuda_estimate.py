"""Predicts the time of the one-launch kernel of csrc/cuda on an H100, from its machine code and its work.

python -m benchmarks.predict.cuda_estimate            # prints cuda_estimates.md from the stored JSON
python -m benchmarks.predict.cuda_estimate --write    # compiles the kernels, then stores both; needs nvcc

No GPU takes part, so nothing here is a measurement.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from benchmarks.measure.tables import table
from benchmarks.paths import ROOT
from benchmarks.predict.cuda_phases import M16, WINDOW, Part, Small, parts
from benchmarks.predict.roofline import Rates, Stored

DOCUMENT = Path(__file__).with_name("cuda_estimates.md")
STORED = DOCUMENT.with_suffix(".json")
ARCHITECTURES = ("80", "90a", "100")
ARITHMETICS = {
    "float32": ("FloatArithmetic", 147_904),  # and its bytes of shared memory
    "tf32": ("Tf32Arithmetic", 147_904),
    "bfloat16": ("HalfArithmetic<bfloat16>", 162_256),
    "float16": ("HalfArithmetic<float16>", 162_256),
}
SHARED = {"80": 163 * 1024, "90a": 227 * 1024, "100": 227 * 1024}  # bytes that a block may have
# Counted instructions: tensor-core products, loads of their operands, asynchronous copies, scalar products.
COUNTED = ("HMMA", "LDSM", "LDGSTS", "FFMA")
SHAPES = ((400, 1000), (400, 2400), (400, 4800), (1024, 768))
GOAL = 20e-6
THREADS = 256  # of csrc/cuda/small_problem.h
TILES = ("splits", "score_down", "score_across", "query_down", "candidate_down", "gradient_across")


def compiled(arithmetic: str, architecture: str) -> Stored:
    """A kernel's registers, spilled and stack bytes and instruction counts, from nvcc and cuobjdump."""
    kernel = f"small_kernel<{ARITHMETICS[arithmetic][0]}>(FASTQT_ARGUMENT SmallProblem)"
    source = (
        '#include "cuda/small_kernel.cuh"\n'
        f"namespace fastqt::cuda {{\ntemplate __global__ void {kernel};\n}}\n"
    )
    from triton import knobs  # Triton comes with cuobjdump

    with tempfile.TemporaryDirectory() as folder:
        file, cubin = Path(folder) / "kernel.cu", Path(folder) / "kernel.cubin"
        file.write_text(source)
        target = f"arch=compute_{architecture},code=sm_{architecture}"
        command = ["nvcc", "-cubin", "-std=c++20", "-O3", "--expt-relaxed-constexpr", f"-I{ROOT / 'csrc'}"]
        command += [f"-gencode={target}", "-Xptxas=-v", "-o", str(cubin), str(file)]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        sass = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "-sass", str(cubin)], capture_output=True, text=True, check=True
        ).stdout
    instructions = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+\s+)?([A-Z][A-Z0-9_]*)", sass)
    return {
        "threads": THREADS,
        "registers": _number(r"Used (\d+) registers", report),
        "shared": ARITHMETICS[arithmetic][1],
        "spills": _number(r"(\d+) bytes spill stores", report) + _number(r"(\d+) bytes spill loads", report),
        "stack": _number(r"(\d+) bytes stack frame", report),
        "sass": len(instructions),
        "instructions": {name: instructions.count(name) for name in COUNTED},
    }


def chosen_tiles(N: int, D: int, blocks: int) -> Stored:
    """The tiles that csrc/cuda/tiling.h chooses for N = M in bfloat16 with both gradients."""
    source = f"""#include <cstdio>
#include "cuda/tiling.h"
using namespace fastqt::cuda;
int main() {{
  SmallProblem p{{}};
  p.N = p.M = {N}, p.D = {D}, p.dqueries = p.dcandidates = &p;
  const Tiles t = choose_tiles(p, kHalfCosts, {blocks});
  std::printf("{"%d " * len(TILES)}", {", ".join(f"t.{name}" for name in TILES)});
}}
"""
    with tempfile.TemporaryDirectory() as folder:
        file, program = Path(folder) / "tiles.cpp", Path(folder) / "tiles"
        file.write_text(source)
        command = ["nvcc", "-std=c++20", f"-I{ROOT / 'csrc'}", "-o", str(program), str(file)]
        subprocess.run(command, capture_output=True, text=True, check=True)
        numbers = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout.split()
    return dict(zip(TILES, map(int, numbers), strict=True))


def _number(pattern: str, report: str) -> int:
    match = re.search(pattern, report)
    if match is None:
        raise RuntimeError(f"no {pattern!r} in the report of ptxas:\n{report}")
    return int(match[1])


def collect() -> Stored:
    version = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    release = re.search(r"release (\S+), V(\S+)", version)
    kernels = {
        f"{arithmetic}, sm_{architecture}": compiled(arithmetic, architecture)
        for arithmetic in ARITHMETICS
        for architecture in ARCHITECTURES
    }
    return {
        "nvcc": release[2] if release else "unknown",
        "rates": asdict(Rates()),
        "small": asdict(Small()),
        "tiles": {f"{N} x {D}": chosen_tiles(N, D, Rates().multiprocessors) for N, D in SHAPES},
        "kernels": kernels,
    }


def predictions(stored: Stored) -> Iterator[tuple[int, int, list[tuple[Part, float, str]]]]:
    rates, small = Rates(**stored["rates"]), Small(**stored["small"])
    for N, D in SHAPES:
        phases = parts(N, D, stored["tiles"][f"{N} x {D}"], rates, small)
        yield N, D, [(part, *part.seconds(rates, small)) for part in phases]


def rendered(stored: Stored) -> str:
    rates, small = Rates(**stored["rates"]), Small(**stored["small"])
    kernels = table(
        ("kernel", "registers", "spilled bytes", "shared KiB", "SASS instructions", *COUNTED),
        (
            (
                name,
                f"{k['registers']}",
                f"{k['spills']}",
                f"{k['shared'] / 1024:.0f}",
                f"{k['sass']:,}",
                *(f"{k['instructions'][i]:,}" for i in COUNTED),
            )
            for name, k in stored["kernels"].items()
        ),
    )
    tiles = table(
        ("N = M", "D", "scores", "parts", "a gradient"),
        (
            (
                f"{N:,}",
                f"{D:,}",
                f"{t['score_down']} x {t['score_across']}",
                str(t["splits"]),
                f"{t['query_down']} x {t['gradient_across']}",
            )
            for N, D in SHAPES
            for t in (stored["tiles"][f"{N} x {D}"],)
        ),
    )
    widest = SHAPES[2]
    least = 6.0 * widest[0] ** 2 * widest[1] / (small.dense_peak * small.mma_share)
    fixed = small.launch + 2 * small.barrier + 2 * small.fill + small.latency
    totals, details = [], []
    for N, D, phases in predictions(stored):
        seconds = sum(time for _, time, _ in phases)
        met = "–" if N != 400 else "yes" if seconds <= GOAL else "no"
        totals.append((f"{N:,}", f"{D:,}", f"{seconds * 1e6:.1f}", f"{GOAL * 1e6:.0f}", met))
        for part, time, limit in phases:
            most = max((block.flops for block in part.blocks), default=0)
            moved, flops = f"{part.bytes() / 1e6:.1f}", f"{most / 1e6:.1f}"
            details.append((f"{N:,}", f"{D:,}", part.name, moved, flops, f"{time * 1e6:.1f}", limit))
    return f"""# The one-launch kernel: what an H100 should take

**These are predictions that no device has tested.** `python -m benchmarks.predict.cuda_estimate` renders
them from `cuda_estimates.json`, which holds what ptxas of nvcc {stored["nvcc"]} reports of the compiled
kernels; the bytes and operations of each block follow from its tiles. The first run on an H100 is to replace
them by measurements.

The model takes each phase's busiest block. It assumes

- {rates.multiprocessors} multiprocessors at {rates.clock / 1e9:.1f} GHz, a block on each;
- {small.dense_peak / 1e12:.0f} TFLOP/s of dense bfloat16, of which mma.sync reaches {small.mma_share:.0%};
- {rates.l2 / 1e12:.0f} TB/s from the L2 cache, which holds all of inputs, scores and gradients, and at most
  {small.l2_a_clock} bytes a clock for one multiprocessor;
- {small.shared_a_clock} bytes a clock to and from a multiprocessor's shared memory;
- targets of a window of {2 * WINDOW + 1}: coefficients in a block of {M16} x {M16} with a target are
  multiplied twice, the second time what rounding took from them;
- {small.launch * 1e6:.1f} µs for a cooperative launch in a CUDA graph,
  {small.barrier * 1e6:.1f} µs for a barrier of the grid,
  {small.fill * 1e6:.1f} µs until a tile's first operands are there, for each tile of a block, and
  {small.latency * 1e6:.1f} µs for a row's chain of loads, sums and exponentials.

The loss and both gradients of N queries and as many candidates, in bfloat16:

{table(("N = M", "D", "predicted µs", "goal µs", "met"), totals)}

What the upstream gradient multiplies afterwards, one launch for each gradient, is not counted. Launch,
barriers and latencies are {fixed * 1e6:.1f} µs where each block has one tile of a product. The three products
of {widest[0]:,} x {widest[1]:,} need another {least * 1e6:.1f} µs of tensor cores all busy throughout, at
the pace of mma.sync. What that size takes beyond are the scores' operands, read again for each row and
column of tiles; the scores' parts, written and read again; and coefficients that are multiplied twice.

## The tiles

`csrc/cuda/tiling.h` chooses them for the problem: how many by rows and by columns, and in how many parts the
scores' inner dimension is taken.

{tiles}

## Where the time goes

{table(("N = M", "D", "part", "MB from L2", "MFLOP of a block", "µs", "limited by"), details)}

## The kernels as compiled

Blocks of {THREADS} threads, one on a multiprocessor.

{kernels}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Predicts what the one-launch kernel takes on an H100.")
    parser.add_argument("--write", action="store_true", help=f"store {DOCUMENT.name} and {STORED.name}")
    if parser.parse_args().write:
        if shutil.which("nvcc") is None:
            parser.error("--write needs nvcc on the PATH")
        STORED.write_text(json.dumps(collect(), indent=1) + "\n")
        DOCUMENT.write_text(rendered(json.loads(STORED.read_text())))
    else:
        print(rendered(json.loads(STORED.read_text())), end="")


if __name__ == "__main__":
    main()
