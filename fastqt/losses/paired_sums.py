"""Logsumexps of pairs in both directions from one score matrix, and those of rows among themselves.

In both the pairs, which are on the diagonal, are left out. They are made of the two walks that engines have
for the rectangles of CLIP's scores, whose gradients take any weights of rows and of columns: eight N M D
operations for both directions where two calls of `log_sum_exp` take sixteen. Rows among themselves have a
symmetric matrix of scores, of which the rows' gradient takes one product: six operations in place of eight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastqt.autograd import transformed
from fastqt.checks import check_backward
from fastqt.distributed import collectives
from fastqt.distributed.batch import Batch
from fastqt.engines import Engine, plans
from fastqt.functional import log_sum_exp
from fastqt.losses.common import scores
from fastqt.options import Backend, DiagonalMode, Memory
from fastqt.problem import ClipProblem, ClipSide, Needs
from fastqt.torch_modes import is_traced


class Walk(NamedTuple):
    """How the scores of some rows are computed; see `contrastive_loss`."""

    scale: float | Tensor
    memory: Memory
    backend: Backend | None
    batch: Batch  # how the rows lie on ranks
    function: str  # the public function, which errors name
    thresholds: Tensor | None = None  # (n,), as of `log_sum_exp`, of rows and of their own columns


def paired_sums(
    rows: Tensor,  # (n, D)
    columns: Tensor,  # (M, D), of all ranks, this rank's first
    own_columns: Tensor,  # (n, D), this rank's
    all_rows: Tensor,  # (M, D), of all ranks, this rank's first
    walk: Walk,
) -> tuple[Tensor, Tensor, Tensor]:
    """The scores of the pairs (n,), and the logsumexps of all else in their rows and in their columns.

    Of one process `columns` are `own_columns` and `all_rows` are `rows`. Of several, either those or these
    are read.
    """
    engine, given = _engine_of(rows, columns, walk)
    if engine is None:
        row_others = others_than_own(rows, columns, walk)
        column_others = others_than_own(own_columns, all_rows, walk)
        return scores(rows, own_columns, walk.scale), row_others, column_others
    return _paired_sums(engine, walk, *given)


def own_sums(rows: Tensor, all_rows: Tensor, walk: Walk) -> Tensor:
    """The logsumexp of each row's scores with all rows but itself, (n,).

    `all_rows` (M, D) are those of all ranks, this rank's first; of one process they are `rows` (n, D).
    """
    engine, (own, every, *scale) = _engine_of(rows, all_rows, walk)
    if engine is None:
        # As another tensor: torch.compile refuses one that is two inputs.
        return others_than_own(rows, all_rows.view_as(all_rows), walk)
    return _own_sums(engine, walk, own, every.detach(), *scale)


def others_than_own(rows: Tensor, columns: Tensor, walk: Walk, negatives: Tensor | None = None) -> Tensor:
    """The logsumexp of each row's scores with all columns but its own, (n,), and with all negatives."""
    return sums_of(rows, columns, walk, diagonal="exclude", negatives=negatives)


def sums_of(
    rows: Tensor,
    columns: Tensor,
    walk: Walk,
    diagonal: DiagonalMode = "keep",
    negatives: Tensor | None = None,
) -> Tensor:
    """`log_sum_exp`, (n,), also of a rank that has no rows."""
    if not len(rows):
        return collectives.nothing((rows, columns, negatives, walk.scale), "none")
    return log_sum_exp(
        rows,
        columns,
        diagonal=diagonal,
        scale=walk.scale,
        negatives=negatives,
        thresholds=walk.thresholds,
        memory=walk.memory,
        backend=walk.backend,
    )


def shares_scores(rows: Tensor, total: int, walk: Walk) -> bool:
    """Whether the sums of `total` columns come from the two walks, and not from `log_sum_exp`."""
    # The choice depends on sizes and dtypes, and no tensor of all columns is made for it.
    columns = rows.new_empty(1, rows.shape[1]).expand(total, -1)
    return _engine_of(rows, columns, walk)[0] is not None


def _engine_of(rows: Tensor, columns: Tensor, walk: Walk) -> tuple[Engine | None, tuple[Tensor, ...]]:
    """The engine of the two walks with what it is given; None where `log_sum_exp` takes their place.

    That is under torch.compile and torch.func, which have to see operators and transforms, in the reference
    engine, which can be differentiated twice, and with thresholds, which rectangles of scores do not have.
    """
    scale = (walk.scale,) if isinstance(walk.scale, Tensor) else ()
    if is_traced(rows, columns) or transformed.is_transformed() or walk.thresholds is not None:
        return None, (rows, columns, *scale)
    p = ClipProblem(rows, columns, walk.scale, walk.memory, pairs=len(rows))
    engine, dtype, computed, _ = plans.plan(None, p, walk.backend)
    if engine.eager:
        return None, (rows, columns, *scale)
    return engine, (rows.to(dtype).to(computed), columns.to(dtype).to(computed), *scale)


def _side(logsumexp: Tensor, weights: Tensor) -> ClipSide:
    """What rows or columns give dL/dS."""
    # One that has no other cells has no weight either, and minus infinity would make it NaN.
    return ClipSide(logsumexp.masked_fill(logsumexp == -torch.inf, 0), weights.to(logsumexp.dtype))


class _PairedSums(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, engine: Engine, walk: Walk, rows: Tensor, columns: Tensor, *scale: Tensor
    ) -> tuple[Tensor, ...]:
        p = ClipProblem(rows, columns, walk.scale, walk.memory, pairs=len(rows))
        positive, row_others, column_others = engine.computation(p).sums(p)
        column_others = walk.batch.log_add_up(column_others)
        ctx.engine, ctx.walk = engine, _without_scale(walk, scale)
        ctx.save_for_backward(rows, columns, row_others, column_others, *scale)
        return positive, row_others, column_others[: len(rows)].clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        walk: Walk = ctx.walk
        check_backward(walk.function, *upstream)
        rows, columns, row_others, column_others, *scale = ctx.saved_tensors
        of_pairs, of_rows, of_columns = upstream
        of_columns = walk.batch.gather_constant_own_first(of_columns)
        p = ClipProblem(rows, columns, scale[0] if scale else walk.scale, walk.memory, pairs=len(rows))
        _, _, *wanted = ctx.needs_input_grad
        found = ctx.engine.computation(p).gradients_from(
            p,
            _side(row_others, of_rows),
            _side(column_others, of_columns),
            of_pairs.to(row_others.dtype),
            Needs(queries=wanted[0], candidates=wanted[1], scale=any(wanted[2:])),
        )
        of_scale = [None if found.scale is None else found.scale.to(x) for x in scale]
        return None, None, found.queries, found.candidates, *of_scale


class _OwnSums(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, engine: Engine, walk: Walk, rows: Tensor, all_rows: Tensor, *scale: Tensor
    ) -> Tensor:
        p = ClipProblem(rows, all_rows, walk.scale, walk.memory, pairs=len(rows))
        sums = engine.computation(p).sums(p).row_others
        ctx.engine, ctx.walk = engine, _without_scale(walk, scale)
        ctx.save_for_backward(rows, all_rows, sums, *scale)
        return sums.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        walk: Walk = ctx.walk
        check_backward(walk.function, *upstream)
        rows, all_rows, sums, *scale = ctx.saved_tensors
        own = _side(sums, upstream[0])
        every = ClipSide(*(walk.batch.gather_constant_own_first(x) for x in own))
        p = ClipProblem(rows, all_rows, scale[0] if scale else walk.scale, walk.memory, pairs=len(rows))
        wanted = ctx.needs_input_grad
        # A row is in the scores of its own row and of its own column. The candidates are the same rows.
        found = ctx.engine.computation(p).gradients_from(
            p, own, every, torch.zeros_like(sums), Needs(queries=wanted[2], scale=any(wanted[4:]))
        )
        of_scale = [None if found.scale is None else (found.scale / 2).to(x) for x in scale]
        return None, None, found.queries, None, *of_scale


# torch gives `apply` no types.
_paired_sums: Callable[..., tuple[Tensor, Tensor, Tensor]] = _PairedSums.apply
_own_sums: Callable[..., Tensor] = _OwnSums.apply


def _without_scale(walk: Walk, scale: tuple[Tensor, ...]) -> Walk:
    """A tensor is saved by autograd, which notices changes in place and frees it."""
    return walk._replace(scale=1.0) if scale else walk
