"""Whether narrow embeddings would gain from tiles of E that stay in the L2 cache, by the model's rules.

Below D = 768 writing E and reading it twice takes longer than its products. A tile of E that stays in the
cache is neither written to memory nor read from it. But a tile of columns must know the sums of its rows
before it is multiplied, so that all scores are computed twice, the first time for their rows' sums alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.measure.tables import table
from benchmarks.predict.choices import LEAD, of_two_groups, tile_key
from benchmarks.predict.options import ITEMSIZE, Plan, product, rows_kernel, scores, seconds, sizes
from benchmarks.predict.products import gemm_time, product_time
from benchmarks.predict.report import milliseconds
from benchmarks.predict.roofline import Rates, Stored, rows_time, scores_time
from benchmarks.predict.schedules import device_seconds

WIDEST = 300  # of what is called narrow
SIDES = (1536, 2048, 2560, 3072, 3584)  # of square tiles of E; the largest takes half of the L2 cache


def tile_launches(plan: Plan, side: int) -> Iterator[Stored]:
    """Those of all tiles: their scores, and both products, which add to sums in float32."""
    for row, height in enumerate(sizes(plan.N, side)):
        for column, width in enumerate(sizes(plan.N, side)):
            yield scores(plan, height, width)
            yield product(height, plan.D, width, add=column > 0)
            yield product(width, plan.D, height, add=row > 0)


def seconds_of_tiles(plan: Plan, side: int, kernel: Stored, rates: Rates) -> float:
    """On the device, of square tiles of this side."""
    N, D = plan.N, plan.D
    # Whatever a tile's launches move lies in the cache.
    cached = replace(rates, memory=rates.l2)
    spent = scores_time({**scores(plan, N, N), "store": False}, kernel, rates).seconds
    for event in tile_launches(plan, side):
        if event["kind"] == "scores":
            spent += scores_time(event, kernel, cached).seconds
        else:
            n, m, k = (event[name] for name in "nmk")
            spent += product_time(n, m, k, ITEMSIZE, 4, event["add"], cached).seconds
    # Both sums are read, and the gradients written.
    spent += 2 * rows_time(rows_kernel(N * D, 2, 4 * N * D), {}, rates).seconds
    return spent


def narrow_table(stored: Stored, tile_kernels: Stored) -> str:
    """The engine's schedule, also with the warp-specialised kernel, beside that of tiles in the cache."""
    rates, kernels = Rates(**stored["rates"]), stored["kernels"]
    header = (
        "N = M",
        "D",
        "GEMM ms",
        "the engine's, ms",
        "× GEMM time",
        "warp-specialised, ms",
        "× GEMM time",
        "tiles in the cache, ms",
        "× GEMM time",
        "their side",
    )
    lines = []
    for schedule in stored["schedules"]:
        N, D = schedule["N"], schedule["D"]
        if D > WIDEST or schedule["memory"] != "fast":
            continue

        height = max(e["rows"] for e in schedule["events"] if e.get("store"))
        plan = Plan(
            N, D, height, tile=(128, 256), descriptors=True, persistent=True, repairs=1, upstream=False
        )
        kernel = tile_kernels[tile_key(plan.tile, plan.descriptors)]
        in_tiles = {side: seconds_of_tiles(plan, side, kernel, rates) for side in SIDES}
        best = min(in_tiles, key=lambda side: in_tiles[side])

        gemm = gemm_time(N, D, rates)
        times = (
            device_seconds(schedule, kernels, rates),
            sum(seconds(replace(plan, lead=LEAD), of_two_groups(kernel), rates).values()),
            in_tiles[best],
        )
        cells = (cell for time in times for cell in (milliseconds(time), f"{time / gemm:.2f}"))
        lines.append((f"{N:,}", f"{D:,}", milliseconds(gemm), *cells, f"{best:,}"))
    return table(header, lines)
