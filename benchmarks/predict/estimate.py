"""Predicts what an H100 will take, from the compiled kernels and the Triton engine's launches.

python -m benchmarks.predict.estimate            # prints gpu_estimates.md from the stored JSON
python -m benchmarks.predict.estimate --write    # compiles the kernels for sm_90, then stores both
python -m benchmarks.predict.estimate --before   # stores the engine as it is as that to compare with

No GPU takes part, so nothing here is a measurement.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.offline.compile import compiler
from benchmarks.predict.choices import choices_table
from benchmarks.predict.collect import collect, collect_tiles
from benchmarks.predict.narrow import narrow_table
from benchmarks.predict.products import product_time
from benchmarks.predict.report import (
    FASTEST,
    SLOWEST,
    comparison_table,
    kernels_table,
    parts_table,
    sensitivity_table,
    summary_table,
    sums_table,
)
from benchmarks.predict.roofline import Rates, Stored

DOCUMENT = Path(__file__).with_name("gpu_estimates.md")
STORED = DOCUMENT.with_suffix(".json")
BEFORE = DOCUMENT.with_name("gpu_estimates_before.json")
SHORT = 65536, 768  # rows and inner dimension of a product that the model is fitted to


def rendered(stored: Stored) -> str:
    """The page of the stored JSON, and of the one that it is compared with."""
    rates, versions, before = stored["rates"], stored["versions"], json.loads(BEFORE.read_text())
    N, D = SHORT
    short = 2.0 * N * N * D / product_time(N, N, D, 2, 2, False, Rates(**rates)).seconds / 1e12
    sections = "\n\n".join(
        f'### {s["loss"]}, N = M = {s["N"]:,}, D = {s["D"]:,}, memory="{s["memory"]}"'
        f"\n\n{parts_table(s, stored)}"
        for s in stored["schedules"]
    )
    return f"""# What an H100 should take: predictions

**These are predictions that no device has tested.** `python -m benchmarks.predict.estimate` renders them
from `gpu_estimates.json`, which holds the launches that the Triton engine would make, recorded on tensors
without data, and the registers, shared memory and instructions of the kernels compiled for sm_90 (Triton
{versions["triton"]}, torch {versions["torch"]}). The first run on an H100 is to replace them by measurements.

The model is a roofline a launch. It assumes

- {rates["multiprocessors"]} multiprocessors at {rates["clock"] / 1e9:.1f} GHz;
- {rates["tensor"] / 1e12:.0f} TFLOP/s of bfloat16 in long products, between the {SLOWEST / 1e12:.0f} and
  {FASTEST / 1e12:.0f} that cuBLAS sustains; a Triton kernel is taken to reach
  {rates["descriptors"]:.0%} of it where it loads by descriptors, and {rates["pointers"]:.0%} where it
  loads by pointers (triton-lang/triton, pull request 5461, measured this difference in a float16 product);
- {rates["memory"] / 1e12:.2f} TB/s of memory (0.9 of its peak) and {rates["l2_size"] / 2**20:.0f} MiB of L2
  cache with {rates["l2"] / 1e12:.1f} TB/s, which the float8 product of that pull request draws with tiles of
  128 × 256;
- {rates["fill"] * 1e6:.0f} µs until the first operands of a program arrive,
  {rates["refill"] * 1e6:.1f} µs for each further tile of a program that visits several, and
  {rates["launch"] * 1e6:.1f} µs a launch in a CUDA graph;
- without a graph {rates["host_triton"] * 1e6:.0f} µs of Python for a Triton launch and
  {rates["host_torch"] * 1e6:.1f} µs for an operation of torch's.

**Products by the vendor's library.** Tiles of the result come in whole waves, one tile for each
multiprocessor, and the best of a few tile sizes counts. Between the products of two tiles of a multiprocessor
there are {rates["drain"] * 1e6:.2f} µs and the time to move the tile to shared memory, at
{rates["shared_a_clock"]} bytes a clock. A product of {SHORT[0]:,} × {SHORT[0]:,} with D = {SHORT[1]} then
reaches {short:.0f} TFLOP/s; 672 to 690 are expected of cuBLAS. The inner dimension is taken in at most
{rates["splits"]} parts, whose sums in float32 fit the {rates["workspace"] / 2**20:.0f} MiB that torch gives
cuBLAS on Hopper. A further launch reads these sums and adds them up.

**What overlaps with what.** What a tile writes overlaps with the products of the next wave. A result that is
added to, as the sums of dG are, is read before the tile can be written, at {rates["l2_a_clock"]} bytes a
clock of the multiprocessor, and overlaps with nothing. The last wave, or the only one, has no products after
it: what it reads and writes of the result takes its time at the memory's pace. A product that was just
written and takes at most half of the L2 cache is read from there by the row kernel after it.

**The scores' kernel.** Its tiles come in whole waves too. Every SASS instruction counts once a tile, those of
branches not taken included. Where only one program fits a multiprocessor they come after the tile's products,
else beside those of another program. In a warp-specialised kernel one group of warps makes its products while
the other is in its epilogue, as far as one is ahead of the other. Where no load runs ahead of the products,
each step along D waits for its operands. A persistent program does not load for the next tile before it has
stored this one.

**Without a graph** the host runs ahead, so that a call takes the longer of the host's and the device's time.

Computed are the loss, both gradients and their product with the upstream gradient in bfloat16, of
QuickThoughts with the targets of `Window(1)`, of SigLIP those of scale and bias too, of CLIP that of the
scale; but for CLIP the targets' lowering is not counted. MixCSE's released form has cosines in float32 for
chunks of E, and each instruction of its kernels counts once a tile of them. GEMM time is three products of
the same shapes with results in bfloat16, by the same rules.

## Against the goals

Under a CUDA graph:

{summary_table(stored)}

## Before and after

The schedule as it was before chunks were made to fill whole waves, and as it is, by the same rules:

{comparison_table(before, stored)}

## How much the assumptions weigh

Times GEMM time with one assumption at a time less favourable, in the loss and in the three products alike:

{sensitivity_table(stored)}

## What each choice is predicted to gain

Schedules written down without the engine, by the same rules and under a CUDA graph, to compare choices before
they are built. Each line adds to those above it, but for those that begin with "if".

{choices_table(before["tiles"], Rates(**stored["rates"]))}

## Narrow embeddings

Below D = 768 it takes longer to write E and to read it twice than to make the products: the three GEMMs,
whose time is given beside, do that too. `benchmarks.tune` chooses the warp-specialised kernel where it is
faster. The schedule of tiles in the cache is not built. It first computes the sums of all rows, for which no
E is stored, and then square tiles of E that stay in the L2 cache, each with both of its products. It computes
the scores twice and launches three kernels a tile.

{narrow_table(stored, before["tiles"])}

## Results of products in float32

The sums of dG are read and written by every chunk of rows.

{sums_table(stored)}

## The kernels as compiled

{kernels_table(stored)}

## Where the time goes

{sections}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Predicts what an H100 will take.")
    parser.add_argument("--write", action="store_true", help=f"store {DOCUMENT.name} and {STORED.name}")
    parser.add_argument("--before", action="store_true", help=f"store {BEFORE.name}")
    arguments = parser.parse_args()
    if arguments.before:
        with compiler():
            BEFORE.write_text(json.dumps({**collect(), "tiles": collect_tiles()}, indent=1) + "\n")
    if arguments.write:
        with compiler():
            STORED.write_text(json.dumps(collect(), indent=1) + "\n")
        DOCUMENT.write_text(rendered(json.loads(STORED.read_text())))
    if not (arguments.write or arguments.before):
        print(rendered(json.loads(STORED.read_text())), end="")


if __name__ == "__main__":
    main()
