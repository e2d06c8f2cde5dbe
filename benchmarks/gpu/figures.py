"""Time and memory of the loss on a GPU, beside its matrix products, eager PyTorch and other libraries."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from benchmarks.gpu import peers
from benchmarks.gpu.peers import Contestant, Inputs, in_graph, make_inputs
from benchmarks.gpu.recorder import recorded_check
from benchmarks.gpu.sections import Options, Record, Verdict, refusals
from benchmarks.gpu.shapes import (
    LARGEST_GRAPHED,
    LARGEST_WINDOW,
    LOW_MEMORY,
    ONE_LAUNCH_ROWS,
    Shape,
    measured,
)
from benchmarks.gpu.stages import MODULES, importable_peers
from benchmarks.measure.timing import Clock, Effort, in_turns
from benchmarks.predict import predictions

ONE_LAUNCH = "fastqt one launch"
EFFORT, DRY_EFFORT = Effort(seconds=2.0), Effort(1, 1, 0.01)


def benchmark(
    options: Options, contestants: str, graphed: bool = False, smallest_first: bool = False
) -> Iterator[Record]:
    """Yields a row for every contestant at a shape as soon as the shape is measured.

    Args:
        options: of the run.
        contestants: a name in `CONTESTANTS`.
        graphed: whether steps are replayed from CUDA graphs.
        smallest_first: for contestants that may not come to the end.
    """
    shapes = measured(options)
    effort = DRY_EFFORT if options.dry_run else EFFORT
    dtype = torch.float16 if options.dry_run else torch.bfloat16
    for shape in sorted(shapes, key=lambda s: s.N * s.M * s.D) if smallest_first else shapes:
        if shape.N <= LARGEST_GRAPHED or not graphed:
            entrants = CONTESTANTS[contestants](shape)
            for row in measure(shape, entrants, dtype, options.device, effort, graphed):
                yield {"kind": "benchmark", **row}


def warm(options: Options, sizes: list[int], memory: str) -> Iterator[Record]:
    """Runs the library's own contestants of a shape once, so that Triton compiles what they launch."""
    shape, device = Shape(*sizes), options.device
    dtype = torch.float16 if options.dry_run else torch.bfloat16
    chosen = {
        name: make
        for name, make in fused_and_eager(shape).items()
        if name.startswith("fastqt") and name.endswith("low") == (memory == "low")
    }
    for name, make in chosen.items():
        yield recorded_check(name, partial(_warmed, make, make_inputs(shape, dtype, device, sets=1)))


def _warmed(make: Contestant, inputs: Inputs) -> Verdict:
    begin = time.perf_counter()
    with refusals():
        results = make(inputs)(0)
    loss = float(results[0])
    return Verdict(math.isfinite(loss), f"loss {loss:.4f}, {time.perf_counter() - begin:.1f} s")


def fused_and_eager(shape: Shape) -> dict[str, Contestant]:
    """The library's modes and eager PyTorch's losses that apply to a shape."""
    chosen: dict[str, Contestant] = {"fastqt": peers.fused(), "eager": peers.eager}
    if shape in LOW_MEMORY:
        chosen["fastqt low"] = peers.fused("low")
    if shape.N == shape.M:
        chosen["fastqt window"] = peers.fused_window()
        if shape in LOW_MEMORY:
            chosen["fastqt window low"] = peers.fused_window("low")
        if shape.N <= LARGEST_WINDOW:
            chosen["eager window"] = peers.eager_window
        if shape.N <= ONE_LAUNCH_ROWS:
            chosen[ONE_LAUNCH] = peers.fused_window(backend="cuda")
    return chosen


def of_pairs(shape: Shape) -> dict[str, Contestant]:
    """SigLIP and CLIP of a square shape: the library's, eager PyTorch's, and those of others present."""
    if shape.N != shape.M:
        return {}
    present = importable_peers()
    return {name: make for name, make in peers.OF_PAIRS.items() if name not in MODULES or name in present}


def peers_present(_: Shape) -> Mapping[str, Contestant]:
    """The other libraries that are there and have a softmax."""
    return {name: peers.PEERS[name] for name in importable_peers() if name in peers.PEERS}


def compiled(_: Shape) -> Mapping[str, Contestant]:
    """torch.compile is measured alone, because it compiles for long before its first step."""
    return {"compiled": peers.compiled}


CONTESTANTS: dict[str, Callable[[Shape], Mapping[str, Contestant]]] = {
    "fused_and_eager": fused_and_eager,
    "of_pairs": of_pairs,
    "peers_present": peers_present,
    "compiled": compiled,
}


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
            "predicted_seconds": predicted[0] if predicted else None,
            "predicted_ratio": predicted[1] if predicted else None,
        }
        for name, result in results.items()
        for predicted in (predictions().get((shape, name)),)
    ]
