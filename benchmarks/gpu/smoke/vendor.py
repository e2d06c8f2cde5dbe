"""How fast the vendor's library is at the engine's products, and which of its kernels it takes for them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.gpu.profile import kernels_of
from benchmarks.gpu.sections import Options, Record, progress
from benchmarks.measure.timing import Clock

HEIGHTS, M, D = (2304, 2816, 5632), 65536, 768  # rows of a chunk of E, its columns, the width
DRY_HEIGHTS, DRY_M, DRY_D = (6, 7), 20, 8
ROUNDS = 12
PROFILED = 3  # calls


def vendor_products(options: Options) -> Iterator[Record]:
    """The three products of chunks of several heights, as the Triton engine asks for them."""
    heights, columns, width = (DRY_HEIGHTS, DRY_M, DRY_D) if options.dry_run else (HEIGHTS, M, D)
    clock = Clock(options.device)
    for rows in heights:
        for name, terms, run in chunk_products(rows, columns, width, options.device):
            times = [clock.seconds(run) for _ in range(ROUNDS)][2:]
            progress()
            kernels, reason = kernels_of(run, options.device, PROFILED)
            seconds = statistics.median(times)
            yield {
                "kind": "product",
                "name": name,
                "seconds": seconds,
                "spread": [min(times), max(times)],
                "tflops": 2 * terms / seconds / 1e12,
                "kernels": kernels,
                "reason": reason,
            }


def chunk_products(
    rows: int, columns: int, width: int, device: torch.device
) -> Iterator[tuple[str, int, Callable[[], None]]]:
    """The name of each product, its multiplications, and what computes it."""
    from fastqt.engines.products import multiply

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=torch.float32).to(torch.bfloat16)

    F, G = drawn(rows, width), drawn(columns, width)
    E = torch.empty(rows, columns, device=device, dtype=torch.bfloat16)
    dF = torch.empty(rows, width, device=device)
    dG = torch.zeros(columns, width, device=device)
    terms = rows * columns * width
    yield f"scores {rows}×{columns}×{width}", terms, lambda: torch.mm(F, G.T, out=E)
    E.copy_(torch.rand(rows, columns, device=device))
    yield f"E·G {rows}×{width}×{columns} beta=0", terms, lambda: multiply(dF, E, G, add=False)
    yield f"Eᵀ·F {columns}×{width}×{rows} beta=1", terms, lambda: multiply(dG, E.T, F, add=True)
