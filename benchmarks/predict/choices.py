"""What each choice of schedule was predicted to gain before it was built, for the document of predictions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.measure.tables import table
from benchmarks.predict.options import ITEMSIZE, Plan, seconds, sizes
from benchmarks.predict.products import gemm_time
from benchmarks.predict.roofline import Rates, Stored

LEAD = 3  # steps between the two groups of warps of the warp-specialised kernel
LOW_ROOM = 40 * 2**20  # bytes of low memory
TILES = ((256, 128), (128, 256))  # of the scores' kernel, each compiled by pointers and by descriptors

# The heights of chunks of whole rows as they were, and those that fill whole waves of multiprocessors.
FAST = {(65536, 768): (2304, 5632), (16384, 1024): (12032, 16384), (8192, 2400): (8192, 8192)}


@dataclass(frozen=True)
class Low:
    """Sizes of low memory: rows at once for dF; columns and rows at once for dG; rows and columns for dF by
    tiles; columns for dG then; and what its heights are multiples of."""

    rows: int
    columns: int
    column_rows: int
    tile: tuple[int, int]
    tile_columns: int
    multiple: int


LOW = {
    (65536, 768): Low(768, 5632, 2048, (5632, 8448), 2816, 768),
    (16384, 1024): Low(1280, 4224, 2816, (2048, 8192), 2048, 256),
    (8192, 2400): Low(2560, 1664, 4096, (1536, 8192), 1536, 256),
}


def tile_key(tile: tuple[int, int], descriptors: bool) -> str:
    """The compiled kernel of a tile among those that are stored for choices."""
    return f"{tile[0]} × {tile[1]}, {'descriptors' if descriptors else 'pointers'}"


def heights(N: int, D: int, columns: int, multiple: int, *, unwritten: bool) -> tuple[int, ...]:
    """Rows of E at once for each block of columns.

    E lies in the room beside the block's sum or, where that is larger, in the part of dG that is not written
    yet.
    """
    rows_at_once, end = [], 0
    for width in sizes(N, columns):
        end += width
        room = LOW_ROOM - 4 * width * D
        if unwritten:
            room = max(room, (N - end) * D * ITEMSIZE)
        rows_at_once.append(min(room // (ITEMSIZE * width) // multiple * multiple, N))
    return tuple(rows_at_once)


def fast_steps(N: int, D: int) -> Iterator[tuple[str, Plan]]:
    """Each step adds to those before, but for those that begin with "if"."""
    before, after = FAST[N, D]
    plan = Plan(N, D, before)
    yield "as it was", plan
    plan = replace(plan, height=after)
    yield f"chunks of {after:,} rows", plan
    plan = replace(plan, tile=(128, 256), persistent=True)
    yield "tiles of 128 × 256, persistent", plan
    plan = replace(plan, descriptors=True)
    yield "operands loaded by descriptors", plan
    plan = replace(plan, upstream=False, repairs=1)
    yield "an upstream factor of 1 and repairs cost a launch each", plan
    yield "if normalize=True made normalised copies", replace(plan, normalised=True)
    if plan.height == N:
        plan = replace(plan, product_itemsize=2)
        yield "products of the only chunk stored in bfloat16", plan
    yield "if loads ran ahead of the tile before", replace(plan, ahead=True)
    plan = replace(plan, lead=LEAD)
    yield "warp-specialised", plan
    yield "operands sent to two multiprocessors at once", replace(plan, multicast=1.5)


def low_steps(N: int, D: int) -> Iterator[tuple[str, Plan]]:
    """The same of low memory."""
    low = LOW[N, D]
    blocks = len(sizes(N, low.columns))
    plan = Plan(N, D, low.rows, columns=low.columns, heights=(low.column_rows,) * blocks)
    yield "as it was", plan
    plan = replace(plan, height=low.tile[0], width=low.tile[1])
    yield f"dF by tiles of {low.tile[0]:,} × {low.tile[1]:,}", plan
    fixed = heights(N, D, low.tile_columns, low.multiple, unwritten=False)
    plan = replace(plan, columns=low.tile_columns, heights=fixed)
    yield f"dG by {low.tile_columns:,} columns", plan
    plan = replace(plan, heights=heights(N, D, low.tile_columns, low.multiple, unwritten=True))
    yield "E in the part of dG that is not written yet", plan
    plan = replace(plan, tile=(128, 256), persistent=True, descriptors=True)
    yield "tiles of 128 × 256, persistent, by descriptors", plan
    plan = replace(plan, upstream=False, repairs=1)
    yield "an upstream factor of 1 and repairs cost a launch each", plan
    yield "if loads ran ahead of the tile before", replace(plan, ahead=True)
    yield "warp-specialised", replace(plan, lead=LEAD)


def of_two_groups(kernel: Stored) -> Stored:
    """What the scores' kernel uses if it is warp-specialised.

    Its two groups of warps run the same code, which is there twice, and a third one copies.
    """
    return {**kernel, "sass": 2 * kernel["sass"], "threads": 384}


def choices_table(kernels: Stored, rates: Rates) -> str:
    """The steps for every shape and both memory modes, under a CUDA graph."""
    header = ("N = M", "D", "memory", "schedule", "scores ms", "products ms", "other ms", "ms", "× GEMM time")
    lines = []
    for memory, steps in (("fast", fast_steps), ("low", low_steps)):
        for N, D in FAST:
            for name, plan in steps(N, D):
                kernel = kernels[tile_key(plan.tile, plan.descriptors)]
                spent = seconds(plan, of_two_groups(kernel) if plan.lead else kernel, rates)
                each = (f"{spent[kind] * 1e3:,.2f}" for kind in ("scores", "product", "rows"))
                total = sum(spent.values())
                times = f"{total / gemm_time(N, D, rates):.3f}"
                lines.append((f"{N:,}", f"{D:,}", memory, name, *each, f"{total * 1e3:,.2f}", times))
    return table(header, lines)
