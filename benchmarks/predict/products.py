"""What the vendor's library would take on an H100 for a matrix product.

A multiprocessor takes one tile of the result after another. Tiles come in whole waves, one for each
multiprocessor. What a tile writes overlaps with the products of the next wave; nothing is left to overlap
with what the last wave reads and writes of the result.
"""

from __future__ import annotations

import math

from benchmarks.predict.roofline import Rates, Time, longest

TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.88), (64, 256, 0.8))  # and their share of the pace


def splits(n: int, m: int, rates: Rates) -> list[int]:
    """In how many parts the inner dimension may be taken: float32 sums of each fit the workspace."""
    return [1, *(s for s in range(2, rates.splits + 1) if 4 * s * n * m <= rates.workspace)]


def product_time(n: int, m: int, k: int, itemsize: int, out_itemsize: int, add: bool, rates: Rates) -> Time:
    """Of (n, k) by (k, m), written or added to what is there, with the best tiles and parts."""
    times = [
        tiled_time((n, m, k), itemsize, out_itemsize, add, tile, parts, rates)
        for tile in TILES
        for parts in splits(n, m, rates)
    ]
    return min(times, key=lambda time: time.seconds)


def tiled_time(
    shape: tuple[int, int, int],
    itemsize: int,
    out_itemsize: int,
    add: bool,
    tile: tuple[int, int, float],
    parts: int,
    rates: Rates,
) -> Time:
    """With tiles of a size, which reach a share of the pace, and the inner dimension in some parts."""
    n, m, k = shape
    rows, columns, share = tile

    tiles = math.ceil(n / rows) * math.ceil(m / columns) * parts
    waves = math.ceil(tiles / rates.multiprocessors)

    # Parts are written in float32; a second launch adds them up, and to what is there.
    written, read = (out_itemsize, out_itemsize * add) if parts == 1 else (4, 0)

    products = 2.0 * rows * columns * math.ceil(k / parts) * rates.multiprocessors / (share * rates.tensor)
    moving = rows * columns / rates.clock * (written / rates.shared_a_clock + read / rates.l2_a_clock)

    result = float(parts * n * m * (written + read))
    last = result * (tiles - (waves - 1) * rates.multiprocessors) / tiles / rates.memory
    operands = float(itemsize * k * (n + m))

    limit, spent = longest(
        {
            "tensor cores": rates.fill + waves * (products + rates.drain) + (waves - 1) * moving,
            "memory": (operands + result) / rates.memory - last,
        }
    )

    moved, seconds = operands + result, rates.launch + spent + max(moving, last)
    if parts > 1:
        added = n * m * (4 * parts + out_itemsize * (1 + add))
        moved, seconds = moved + added, seconds + rates.launch + added / rates.memory

    return Time(seconds, limit, 2.0 * n * m * k, moved)


def gemm_time(N: int, D: int, rates: Rates) -> float:
    """Three products of the loss's shapes with results in bfloat16."""
    shapes = ((N, N, D), (N, D, N), (N, D, N))
    return sum(product_time(n, m, k, 2, 2, False, rates).seconds for n, m, k in shapes)
