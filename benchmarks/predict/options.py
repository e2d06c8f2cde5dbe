"""What a schedule that is not built would cost: the launches that it would make, by the same rules.

A `Plan` says what a choice is about: heights of chunks, the scores' tile, how often something is launched.
`launches` writes down what it would launch for a problem like QuickThoughts', and `seconds` adds it up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.predict.products import product_time
from benchmarks.predict.roofline import Rates, Stored, rows_time, scores_time

ITEMSIZE = 2
SAMPLE = 256  # of fastqt.engines.triton.softmax


@dataclass(frozen=True)
class Plan:
    """A schedule for N = M rows of width D in bfloat16.

    Attributes:
        height: rows of E at once, of a chunk of whole rows or, with `width`, of tiles of E.
        width: columns of E at once where dF adds up over tiles; None for whole rows.
        columns: columns of E at once in the second walk of low memory, for dG; None for one walk.
        heights: rows of E at once in that walk, for each of its blocks of columns.
        tile: of the scores' kernel.
        descriptors, persistent, ahead, lead, multicast: what the scores' kernel does; see `roofline`.
        repairs: launches a chunk that have nothing to do.
        upstream: whether backward multiplies both gradients by a factor of 1.
        product_itemsize: bytes of an element of a product's result.
        normalised: whether inputs are copied with their rows normalised, and gradients taken back.
    """

    N: int
    D: int
    height: int
    width: int | None = None
    columns: int | None = None
    heights: tuple[int, ...] = ()
    tile: tuple[int, int] = (256, 128)
    descriptors: bool = False
    persistent: bool = False
    ahead: bool = False
    lead: int = 0
    multicast: float = 1.0
    repairs: int = 5
    upstream: bool = True
    product_itemsize: int = 4
    normalised: bool = False


def sizes(total: int, step: int) -> list[int]:
    """The lengths of the pieces of `total` in steps."""
    return [min(step, total - start) for start in range(0, total, step)]


def scores(plan: Plan, rows: int, columns: int) -> Stored:
    tiles = math.ceil(rows / plan.tile[0]) * math.ceil(columns / plan.tile[1])
    return {
        **{"kind": "scores", "rows": rows, "columns": columns, "width": plan.D, "itemsize": ITEMSIZE},
        **{"store": True, "tile": plan.tile, "step": 64, "group": 8, "descriptors": plan.descriptors},
        **{"programs": min(tiles, Rates().multiprocessors) if plan.persistent else tiles},
        **{"ahead": plan.ahead, "lead": plan.lead, "multicast": plan.multicast},
    }


def product(n: int, m: int, k: int, *, add: bool) -> Stored:
    return {"kind": "product", "n": n, "m": m, "k": k, "add": add}


def rows_kernel(elements: int, copies: int, product_bytes: int = 0) -> Stored:
    """A kernel that reads or writes some elements so many times, and once a product's result."""
    return {"kind": "rows", "bytes": ITEMSIZE * elements * copies, "product_bytes": product_bytes}


def launches(plan: Plan) -> Iterator[Stored]:
    """What the plan would launch."""
    N, D = plan.N, plan.D

    yield {**scores(plan, N, SAMPLE), "store": False}
    for _ in range(5):  # the sample's maxima, the lowering of targets
        yield rows_kernel(0, 0)
    yield rows_kernel(N * D, 2)  # the exact cells' scores

    if plan.normalised:
        yield rows_kernel(2 * N * D, 2)  # the copies, then their gradients and both
        yield rows_kernel(2 * N * D, 3)

    for number, height in enumerate(sizes(N, plan.height)):
        yield from query_launches(plan, height, first=number == 0)

    if plan.columns is None:
        yield rows_kernel(N * D, 2, plan.product_itemsize * N * D)
    else:
        yield from column_launches(plan)

    for _ in range(6):  # targets by column, the sum of the losses
        yield rows_kernel(0, 0)
    if plan.upstream:
        yield from (rows_kernel(N * D, 2) for _ in range(2))
    else:
        yield rows_kernel(0, 0)


def query_launches(plan: Plan, height: int, *, first: bool) -> Iterator[Stored]:
    """A chunk's, for dF and, in one walk, for dG."""
    N, D = plan.N, plan.D
    for number, width in enumerate(sizes(N, plan.width or N)):
        yield scores(plan, height, width)
        if plan.width is not None:
            yield product(height, D, width, add=number > 0)
    yield rows_kernel(height * math.ceil(N / plan.tile[1]), 2)
    yield from (rows_kernel(0, 0) for _ in range(plan.repairs))
    if plan.width is None:
        yield product(height, D, N, add=False)
    one_walk = plan.columns is None
    yield rows_kernel(height * D, 4 if one_walk else 3, plan.product_itemsize * height * D)
    if one_walk:
        yield product(N, D, height, add=not first)


def column_launches(plan: Plan) -> Iterator[Stored]:
    """Those of the second walk of low memory, for dG."""
    assert plan.columns is not None
    blocks = sizes(plan.N, plan.columns)
    for columns, most in zip(blocks, plan.heights, strict=True):
        for number, height in enumerate(sizes(plan.N, most)):
            yield scores(plan, height, columns)
            yield product(columns, plan.D, height, add=number > 0)
        yield rows_kernel(columns * plan.D, 2, plan.product_itemsize * columns * plan.D)


def seconds(plan: Plan, kernel: Stored, rates: Rates) -> dict[str, float]:
    """By kind of launch, on the device, with what the scores' kernel uses once compiled."""
    spent = dict.fromkeys(("scores", "product", "rows"), 0.0)
    for event in launches(plan):
        if event["kind"] == "scores":
            time = scores_time(event, kernel, rates)
        elif event["kind"] == "product":
            n, m, k = (event[name] for name in "nmk")
            time = product_time(n, m, k, ITEMSIZE, plan.product_itemsize, event["add"], rates)
        else:
            time = rows_time(event, {}, rates)
        spent[event["kind"]] += time.seconds
    return spent
