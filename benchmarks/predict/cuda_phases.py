"""The work of each block in each phase of csrc/cuda's one-launch kernel, and the time an H100 needs for it.

Everything follows from sizes, tiles and assumed rates; nothing is measured.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass

from benchmarks.predict.roofline import Rates, Stored

DEPTH = 32  # of csrc/cuda/small_problem.h
M16, N8, HALVES, QUARTERS = (
    16,
    8,
    2,
    4,
)  # of csrc/cuda/tiling.h: rows and columns of mma.sync, and shares of warps
AHEAD = 3  # steps of DEPTH that csrc/cuda/tile_product.cuh fetches before the first product
WINDOW = 1  # of the targets; blocks with targets are multiplied a second time, with their rounding errors


@dataclass(frozen=True)
class Small:
    """Assumptions beside those of `Rates`; none of them is measured here."""

    dense_peak: float = 989e12  # bfloat16 operations a second
    mma_share: float = 0.62  # of that peak within reach of mma.sync, which is not Hopper's own instruction
    l2_a_clock: int = 64  # bytes that a multiprocessor takes from the L2 cache a clock
    shared_a_clock: int = 128  # bytes to and from its shared memory
    launch: float = 2.5e-6  # seconds of a cooperative launch in a CUDA graph
    barrier: float = 1.5e-6  # seconds of a barrier of the grid
    fill: float = 1.0e-6  # seconds until a tile's first operands are there
    latency: float = 1.5e-6  # seconds of a row's chain of loads, sums and exponentials


@dataclass(frozen=True)
class Work:
    """A block's work for a tile."""

    bytes: float = 0.0  # from and to L2
    flops: float = 0.0  # at the pace of the busiest quarter of its multiprocessor
    shared: float = 0.0  # bytes to and from shared memory
    tiles: int = 1

    def __add__(self, other: Work) -> Work:
        mine, others = astuple(self), astuple(other)
        return Work(*(a + b for a, b in zip(mine, others, strict=True)))


@dataclass(frozen=True)
class Part:
    """A phase of the kernel: the work of each of its blocks."""

    name: str
    blocks: list[Work]
    fixed: float  # seconds, for each tile of a block
    hides: bool = False  # whether the work is done during the fixed time

    def bytes(self) -> float:
        return sum(block.bytes for block in self.blocks)

    def seconds(self, rates: Rates, small: Small) -> tuple[float, str]:
        most = {
            name: max((getattr(block, name) for block in self.blocks), default=0)
            for name in ("bytes", "flops", "shared", "tiles")
        }
        fixed = self.fixed * max(most["tiles"], 1)
        times = {
            "L2": max(self.bytes() / rates.l2, most["bytes"] / (small.l2_a_clock * rates.clock)),
            "tensor cores": most["flops"] * rates.multiprocessors / (small.dense_peak * small.mma_share),
            "shared memory": most["shared"] / (small.shared_a_clock * rates.clock),
        }
        limit = max(times, key=lambda name: times[name])
        total = max(fixed, times[limit]) if self.hides else fixed + times[limit]
        return total, limit if times[limit] > fixed else "latency"


def parts(N: int, D: int, tiles: Stored, rates: Rates, small: Small, itemsize: int = 2) -> list[Part]:
    """The phases for N = M in the kernel's order; tiles are dealt to blocks as the kernel does it."""
    blocks, m16_tiles, steps = rates.multiprocessors, math.ceil(N / M16), math.ceil(D / DEPTH)
    scores, gradients, ahead = [], [], []

    columns = _pieces(math.ceil(N / N8), tiles["score_across"])
    for depth in _pieces(steps, tiles["splits"]):
        for across in columns:
            for down in _pieces(m16_tiles, tiles["score_down"]):
                scores.append(_tile(len(down), len(across), len(depth) * DEPTH, 0, itemsize, 4))

    for down_parts in (tiles["query_down"], tiles["candidate_down"]):
        for across in _pieces(math.ceil(D / N8), tiles["gradient_across"]):
            for down in _pieces(m16_tiles, down_parts):
                exact = sum(abs(m16_tile - k) <= WINDOW for m16_tile in down for k in range(m16_tiles))
                gradients.append(_tile(len(down), len(across), N, exact, itemsize, itemsize))
                ahead.append(Work(itemsize * N8 * len(across) * min(AHEAD * DEPTH, N)))

    for block, fetched in enumerate(ahead[:blocks]):
        gradients[block] += Work(-fetched.bytes, tiles=0)

    row_bytes = N * (4.0 * tiles["splits"] + 2 * itemsize)
    rows = [Work(row_bytes * len(range(block, N, blocks))) for block in range(blocks)]

    return [
        Part("launch", [], small.launch),
        Part("scores", _dealt(scores, blocks), small.fill),
        Part("barrier", [], small.barrier),
        Part("rows", rows, small.latency),
        Part("barrier", ahead[:blocks], small.barrier, hides=True),
        Part("gradients", _dealt(gradients, blocks), small.fill),
    ]


def _pieces(total: int, pieces: int) -> list[range]:
    return [range(total * n // pieces, total * (n + 1) // pieces) for n in range(pieces)]


def _tile(m16_tiles: int, n8_tiles: int, depth: int, exact: int, itemsize: int, out_itemsize: int) -> Work:
    """A tile's work; `exact` blocks of M16 x M16 of its first operand are multiplied twice."""
    rows, columns = M16 * m16_tiles, N8 * n8_tiles
    again = exact * M16**2
    # The blocks that are multiplied twice are spread evenly over the m16 tiles.
    products = busiest_quarter(m16_tiles, n8_tiles) * (depth + again / rows)
    lines = rows + columns + sum(M16 * s + 2 * N8 * math.ceil(e / 2) for s, e in shares(m16_tiles, n8_tiles))
    return Work(
        itemsize * ((rows + columns) * depth + again) + out_itemsize * rows * columns,
        2.0 * M16 * N8 * QUARTERS * products,
        itemsize * (lines * depth + (1 + QUARTERS) * again),
    )


def shares(m16_tiles: int, n8_tiles: int) -> list[tuple[int, int]]:
    """A tile's m16 tiles and n8 tiles for each warp; warps on the same quarter are QUARTERS apart."""
    of_warps = []
    for warp in range(HALVES * QUARTERS):
        half, quarter = warp // QUARTERS, (warp % QUARTERS + warp // QUARTERS) % QUARTERS
        of_warps.append(((m16_tiles + 1 - half) // HALVES, len(_pieces(n8_tiles, QUARTERS)[quarter])))
    return of_warps


def busiest_quarter(m16_tiles: int, n8_tiles: int) -> int:
    """How many products of M16 x N8 the busiest quarter has in a step of the depth."""
    each = [s * e for s, e in shares(m16_tiles, n8_tiles)]
    return max(each[quarter] + each[quarter + QUARTERS] for quarter in range(QUARTERS))


def _dealt(tiles: list[Work], blocks: int) -> list[Work]:
    return [sum(tiles[block::blocks], Work(tiles=0)) for block in range(blocks)]
