"""Runs the loop over a link's scores: in one walk where the memory allows it, otherwise in two."""

from __future__ import annotations

from collections.abc import Callable

from fastqt.engines.triton import two_walks
from fastqt.engines.triton.loop import CellLink, Loop, RowLink
from fastqt.kernels.bias_gradients import bias_gradient_epilogue

LEAST_ROWS = 1024  # of E, with which one walk is faster than two


def run_rows(link: RowLink) -> None:
    """Finds the losses and gradients of the operands of a link that sums rows."""
    loop, o = Loop(link), link.operands
    # Fewer rows at a time read and add to the float32 sums so often that a second walk takes less time.
    enough = min(o.N, LEAST_ROWS) * loop.row_bytes() <= o.room - o.product_bytes
    in_one_walk = o.p.memory == "fast" or (o.p.memory != "low" and enough)
    _run(loop, lambda: loop.chunks_of_rows(link), in_one_walk=in_one_walk)


def run_cells(link: CellLink) -> None:
    """Finds the losses and gradients of the operands of a link without row sums."""
    loop, o = Loop(link), link.operands
    in_one_walk = o.p.memory == "fast" or o.product_bytes <= o.room // 2
    _run(loop, lambda: loop.tiles(link), in_one_walk=in_one_walk)


def _run(loop: Loop, one_walk: Callable[[], None], *, in_one_walk: bool) -> None:
    """Sums alone where nothing wants a gradient; else all from one walk, or from one for each side."""
    o = loop.operands
    if not o.differentiates:
        loop.sum_rows()
    elif in_one_walk:
        one_walk()
    else:
        two_walks.run(loop)

    if o.bias_gradient is not None and loop.column_sums is not None:
        bias_gradient_epilogue(
            loop.column_sums,
            o.weight_norm,
            o.prob_scale,
            loop.scores.targets_by_column,
            loop.scores.cells.coefficients,
            o.bias_gradient,
        )
