"""Predicts what the one-launch kernel of csrc/cuda takes on an H100, from its machine code and its work.

python -m benchmarks.cuda_estimate            # prints docs/cuda_estimates.md from the stored inputs
python -m benchmarks.cuda_estimate --write    # compiles the kernels first, and stores both; needs nvcc

No GPU takes part, so nothing here is a measurement.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.render import table
from benchmarks.roofline import Rates, Stored

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "cuda_estimates.md"
STORED = DOCUMENT.with_suffix(".json")
ARCHITECTURES = ("80", "90a", "100")
ARITHMETICS = {
    "float32": ("FloatArithmetic", 147_456),  # and its shared memory
    "tf32": ("Tf32Arithmetic", 147_456),
    "bfloat16": ("HalfArithmetic<bfloat16>", 122_880),
    "float16": ("HalfArithmetic<float16>", 122_880),
}
SHARED = {"80": 163 * 1024, "90a": 227 * 1024, "100": 227 * 1024}  # bytes that a block may have
COUNTED = (
    "HMMA",
    "LDSM",
    "LDGSTS",
    "FFMA",
)  # tensor cores, their operands, copies that run ahead, and no such
SHAPES = ((400, 1000), (400, 2400), (400, 4800), (1024, 768))
GOAL = 20e-6
THREADS, TILE, DEPTH, MOST_SPLITS = 256, 128, 32, 16  # of csrc/cuda/small_problem.h


@dataclass(frozen=True)
class Small:
    """What is assumed beside `Rates`; none of it measured here."""

    dense_peak: float = 989e12  # bfloat16 operations a second
    mma_share: float = 0.62  # of that peak within reach of mma.sync, which is not Hopper's own instruction
    l2_a_clock: int = 64  # bytes that a multiprocessor takes from the L2 cache a clock
    launch: float = 2.5e-6  # seconds of a cooperative launch in a CUDA graph
    barrier: float = 1.5e-6  # seconds of a barrier of the grid
    fill: float = 1.0e-6  # seconds until a tile's first operands are there
    latency: float = 1.5e-6  # seconds of a row's chain of loads, sums and exponentials


def compiled(arithmetic: str, architecture: str) -> Stored:
    """Registers, spilled and stack bytes, and counts of instructions of a kernel, by nvcc and cuobjdump."""
    kernel = f"small_kernel<{ARITHMETICS[arithmetic][0]}>(FASTQT_ARGUMENT SmallProblem)"
    source = (
        '#include "cuda/small_kernel.cuh"\n'
        f"namespace fastqt::cuda {{\ntemplate __global__ void {kernel};\n}}\n"
    )
    from triton import knobs  # whose cuobjdump comes with it

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


def _number(pattern: str, report: str) -> int:
    found = re.search(pattern, report)
    if found is None:
        raise RuntimeError(f"no {pattern!r} in what ptxas reports:\n{report}")
    return int(found[1])


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
        "kernels": kernels,
    }


@dataclass(frozen=True)
class Part:
    """A phase of the kernel, as its busiest block sees it, and in all."""

    name: str
    bytes: float  # from L2, of all blocks
    block_bytes: float
    block_flops: float
    fixed: float  # seconds

    def seconds(self, rates: Rates, small: Small) -> tuple[float, str]:
        blocks = rates.multiprocessors
        times = {
            "L2": max(self.bytes / rates.l2, self.block_bytes / (small.l2_a_clock * rates.clock)),
            "tensor cores": self.block_flops * blocks / (small.dense_peak * small.mma_share),
        }
        limit = max(times, key=lambda name: times[name])
        return self.fixed + times[limit], limit if times[limit] > self.fixed else "latency"


def parts(N: int, D: int, rates: Rates, small: Small, itemsize: int = 2) -> list[Part]:
    """The phases of N = M, in the order of the kernel; blocks share tiles as it has them do."""
    blocks, side = rates.multiprocessors, math.ceil(N / TILE)
    steps = math.ceil(D / DEPTH)
    splits = max(1, min(blocks // side**2, MOST_SPLITS, math.ceil(steps / 2)))
    depth = math.ceil(steps / splits) * DEPTH
    heights = [min(TILE, N - TILE * n) for n in range(side)]
    score_tiles = [
        (itemsize * (rows + columns) * depth + 4 * rows * columns, products(rows, columns, depth))
        for _ in range(splits)
        for columns in heights
        for rows in heights
    ]
    widths = [min(TILE, D - TILE * n) for n in range(math.ceil(D / TILE))]
    gradient_tiles = [
        (itemsize * ((rows + columns) * N + rows * columns), products(rows, columns, N))
        for _ in range(2)
        for rows in heights
        for columns in widths
    ]
    row_bytes = N * N * (4.0 * splits + 2 * itemsize)
    return [
        Part("launch", 0, 0, 0, small.launch),
        _dealt("scores", score_tiles, blocks, small.fill),
        Part("barrier", 0, 0, 0, small.barrier),
        Part("rows", row_bytes, row_bytes / N * math.ceil(N / blocks), 0, small.latency),
        Part("barrier", 0, 0, 0, small.barrier),
        _dealt("gradients", gradient_tiles, blocks, small.fill),
    ]


def products(rows: int, columns: int, depth: int) -> float:
    """Operations of a tile, of which warps with nothing inside do none."""
    return 2.0 * min(64 * math.ceil(rows / 64), TILE) * min(32 * math.ceil(columns / 32), TILE) * depth


def _dealt(name: str, tiles: list[tuple[float, float]], blocks: int, fixed: float) -> Part:
    busiest = [[sum(tile[k] for tile in tiles[b::blocks]) for b in range(blocks)] for k in range(2)]
    return Part(name, sum(tile[0] for tile in tiles), max(busiest[0]), max(busiest[1]), fixed)


def predictions(stored: Stored) -> Iterator[tuple[int, int, list[tuple[Part, float, str]]]]:
    rates, small = Rates(**stored["rates"]), Small(**stored["small"])
    for N, D in SHAPES:
        yield N, D, [(part, *part.seconds(rates, small)) for part in parts(N, D, rates, small)]


def rendered(stored: Stored) -> str:
    rates, small = Rates(**stored["rates"]), Small(**stored["small"])
    kernels = table(
        ("kernel", "registers", "spilled bytes", "shared KiB", "SASS instructions", *COUNTED),
        (
            (
                *(name, f"{k['registers']}", f"{k['spills']}", f"{k['shared'] / 1024:.0f}", f"{k['sass']:,}"),
                *(f"{k['instructions'][i]:,}" for i in COUNTED),
            )
            for name, k in stored["kernels"].items()
        ),
    )
    totals, details = [], []
    for N, D, found in predictions(stored):
        seconds = sum(time for _, time, _ in found)
        met = "–" if N != 400 else "yes" if seconds <= GOAL else "no"
        totals.append((f"{N:,}", f"{D:,}", f"{seconds * 1e6:.1f}", f"{GOAL * 1e6:.0f}", met))
        for part, time, limit in found:
            moved, flops = f"{part.bytes / 1e6:.1f}", f"{part.block_flops / 1e6:.1f}"
            details.append((f"{N:,}", f"{D:,}", part.name, moved, flops, f"{time * 1e6:.1f}", limit))
    return f"""# The one-launch kernel: what an H100 should take

**These are predictions that no device has tested.** They are rendered by
`python -m benchmarks.cuda_estimate --write` from `cuda_estimates.json`: what ptxas of nvcc {stored["nvcc"]}
says of the compiled kernels, and the bytes and operations that the kernel's blocks share out. The first run
on an H100 is to replace them by measurements.

The model takes each phase's busiest block. It assumes

- {rates.multiprocessors} multiprocessors at {rates.clock / 1e9:.1f} GHz, a block on each;
- {small.dense_peak / 1e12:.0f} TFLOP/s of dense bfloat16, of which mma.sync reaches {small.mma_share:.0%};
- {rates.l2 / 1e12:.0f} TB/s from the L2 cache, which holds all of inputs, scores and gradients, and at most
  {small.l2_a_clock} bytes a clock for one multiprocessor;
- {small.launch * 1e6:.1f} µs for a cooperative launch in a CUDA graph,
  {small.barrier * 1e6:.1f} µs for a barrier of the grid,
  {small.fill * 1e6:.1f} µs until a tile's first operands are there, and
  {small.latency * 1e6:.1f} µs for a row's chain of loads, sums and exponentials.

The loss and both gradients of N queries and as many candidates, in bfloat16:

{table(("N = M", "D", "predicted µs", "goal µs", "met"), totals)}

What the upstream gradient multiplies afterwards, one launch for each gradient, is not counted. Where the
goal is missed, most of the time goes into reading operands from the L2 cache once for each tile: a cluster of
blocks that share them would read less.

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
        print(rendered(json.loads(STORED.read_text())))


if __name__ == "__main__":
    main()
