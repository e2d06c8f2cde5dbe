"""Time and memory of the loss on a GPU, beside its matrix products, eager PyTorch and other libraries."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.gpu import peers
from benchmarks.gpu.peers import Contestant, Shape, in_graph, make_inputs
from benchmarks.gpu.sections import Options, Record
from benchmarks.measure.timing import Clock, Effort, in_turns
from fastqt.tools.bench import MIB

EFFORT, DRY_EFFORT = Effort(), Effort(1, 1, 0.01)

SHAPES = (
    Shape(65536, 65536, 768),
    Shape(8192, 128256, 4096),  # a linear cross-entropy over a large vocabulary
    Shape(16384, 16384, 1024),
    Shape(8192, 8192, 2400),
    Shape(400, 400, 1000),  # the QuickThoughts paper's batch
    Shape(1024, 1024, 768),
    Shape(32768, 32768, 768),
    Shape(2048, 2048, 768),  # too large for the one-launch kernel, yet small enough that launches matter
)
QUICK_SHAPES = (SHAPES[2], SHAPES[5])
DRY_SHAPES = (Shape(6, 6, 8), Shape(5, 9, 8))
LARGEST_GRAPHED = 2048  # rows; launches are hidden behind the work of larger problems
LARGEST_WINDOW = 4096  # rows; eager PyTorch needs a dense target matrix
LOW_MEMORY = (SHAPES[0], DRY_SHAPES[0])

# Times as multiples of the three products' time, as the design predicts them.
PREDICTIONS: Mapping[tuple[Shape, str], float] = {
    (SHAPES[0], "fastqt"): 1.12,
    (SHAPES[0], "fastqt low"): 1.45,
}


def benchmark(
    options: Options,
    contestants: Callable[[Shape], Mapping[str, Contestant]],
    graphed: bool = False,
    smallest_first: bool = False,
) -> Iterator[Record]:
    """Yields a row for every contestant at a shape as soon as the shape is measured."""
    shapes = DRY_SHAPES if options.dry_run else QUICK_SHAPES if options.quick else SHAPES
    effort = DRY_EFFORT if options.dry_run else EFFORT
    dtype = torch.float16 if options.dry_run else torch.bfloat16
    for shape in sorted(shapes, key=lambda s: s.N * s.M * s.D) if smallest_first else shapes:
        if shape.N <= LARGEST_GRAPHED or not graphed:
            for row in measure(shape, contestants(shape), dtype, options.device, effort, graphed):
                yield {"kind": "benchmark", **row}


def fused_and_eager(shape: Shape) -> dict[str, Contestant]:
    """The library's modes and eager PyTorch's losses that apply to a shape."""
    chosen: dict[str, Contestant] = {"fastqt": peers.fused(), "eager": peers.eager}
    if shape in LOW_MEMORY:
        chosen["fastqt low"] = peers.fused("low")
    if shape.N == shape.M:
        chosen["fastqt window"] = peers.fused_window
        if shape.N <= LARGEST_WINDOW:
            chosen["eager window"] = peers.eager_window
    return chosen


def compiled(_: Shape) -> Mapping[str, Contestant]:
    """torch.compile is measured alone, because it compiles for long before its first step."""
    return {"compiled": peers.compiled}


def measure(
    shape: Shape,
    contestants: Mapping[str, Contestant],
    dtype: torch.dtype,
    device: torch.device,
    effort: Effort,
    graphed: bool = False,
) -> list[dict[str, Any]]:
    """A row for each contestant and for the three matrix products of the same shape."""
    entrants: dict[str, Contestant] = {"GEMMs": peers.products, **contestants}
    if graphed:
        entrants = {name: in_graph(make) for name, make in entrants.items()}
    clock = Clock(device)
    inputs = make_inputs(shape, dtype, device)
    results = in_turns(entrants, inputs, clock, effort, len(inputs.sets) if graphed else 1)
    del inputs
    clock.free()
    gemm_seconds = results["GEMMs"].seconds
    return [
        {
            "shape": shape.name,
            **asdict(shape),
            "dtype": str(dtype).removeprefix("torch."),
            "graphed": graphed,
            "contestant": name,
            **asdict(result),
            "gemm_seconds": gemm_seconds,
            "ratio_to_gemm": result.seconds / gemm_seconds if result.seconds and gemm_seconds else None,
            "predicted_ratio": None if graphed else PREDICTIONS.get((shape, name)),
        }
        for name, result in results.items()
    ]


HEADER = ("shape", "contestant", "ms", "× GEMMs", "predicted", "MiB above", "loss", "or why not")


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """A row as it is printed under `HEADER`."""

    def shown(value: float | None, form: str, unit: float = 1) -> str:
        return "–" if value is None else format(value / unit, form)

    return (
        row["shape"],
        row["contestant"] + (", graph" if row["graphed"] else ""),
        shown(row["seconds"], ",.3f", 1e-3),
        shown(row["ratio_to_gemm"], ".2f"),
        shown(row["predicted_ratio"], ".2f"),
        shown(row["peak_bytes"], ",.0f", MIB),
        shown(row["loss"], ".4f"),
        (row["reason"] or "")[:70],
    )
