"""Logsumexps of pairs in both directions from one score matrix, and those of rows among themselves.

In both the pairs, which are on the diagonal, are left out. They are made of the two walks that engines have
for the rectangles of CLIP's scores, whose gradients take any weights of rows and of columns: eight N M D
operations for both directions where two calls of `log_sum_exp` take sixteen. Rows among themselves have a
symmetric matrix of scores, of which the rows' gradient takes one product: six operations in place of eight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastqt.checks import check_backward
from fastqt.distributed import collectives
from fastqt.distributed.batch import Batch
from fastqt.engines import Engine, plans
from fastqt.exclusions import Exclusions
from fastqt.functional import log_sum_exp
from fastqt.loss import Arguments
from fastqt.options import DiagonalMode, Memory
from fastqt.problem import ClipProblem, ClipSide, Needs
from fastqt.torch_modes import is_traced, is_transformed


class PairScoring(NamedTuple):
    """How the scores of some rows are computed: with a scale, and otherwise as a loss's arguments say.

    Of several multiples each has logsumexps of its own, which are then (multiples, n) in place of (n,).
    """

    scale: float | Tensor
    call: Arguments
    multiples: tuple[float, ...] = (1.0,)
    leaving: Tensor | None = None  # (n, M) bool: the cells that leave

    def problem(self, rows: Tensor, columns: Tensor, *, keeps: bool = False) -> ClipProblem:
        memory = self.call.values["memory"]
        p = ClipProblem(rows, columns, self.scale, memory, pairs=len(rows), keeps=keeps)
        p.multiples, p.mask = self.multiples, self.leaving
        return p


def paired_sums(rows: Tensor, columns: Tensor, scoring: PairScoring) -> tuple[Tensor, Tensor, Tensor]:
    """The scores of the pairs (n,), and the logsumexps of all else in their rows and in their columns.

    Only where `shares_scores` says so. Of the rows (n, D) of several ranks, `columns` (M, D) are those of all
    ranks, this rank's first.
    """
    engine, inputs = _engine_of(rows, columns, scoring)
    return _paired_sums(engine, scoring, *inputs)


def own_sums(rows: Tensor, all_rows: Tensor, scoring: PairScoring) -> Tensor:
    """The logsumexp of each row's scores with all rows but itself, (n,), as `paired_sums` has those."""
    engine, (own_rows, every, *scale) = _engine_of(rows, all_rows, scoring)
    return _own_sums(engine, scoring, own_rows, every.detach(), *scale)


def sums_of(
    rows: Tensor,
    columns: Tensor,
    scoring: PairScoring,
    exclude: Exclusions | None = None,
    negatives: Tensor | None = None,
    *,
    diagonal: DiagonalMode = "keep",
) -> Tensor:
    """`log_sum_exp`, (n,), also of a rank that has no rows."""
    if not len(rows):
        return collectives.nothing((rows, columns, negatives, scoring.scale), "none")
    return scoring.call.here(
        log_sum_exp,
        queries=rows,
        candidates=columns,
        diagonal=diagonal,
        scale=scoring.scale,
        negatives=negatives,
        exclude=exclude,
        normalize=False,
    )


def shares_scores(rows: Tensor, total: int, scoring: PairScoring) -> Engine | None:
    """The engine that finds the sums of `total` columns by the two walks; None for `log_sum_exp`."""
    # The choice depends on sizes and dtypes, and no tensor of all columns is made for it.
    columns = rows.new_empty(1, rows.shape[1]).expand(total, -1)
    return _engine_of(rows, columns, scoring)[0]


def _engine_of(
    rows: Tensor, columns: Tensor, scoring: PairScoring
) -> tuple[Engine | None, tuple[Tensor, ...]]:
    """The engine of the two walks with what it is given; None where `log_sum_exp` takes their place.

    That is under torch.compile and torch.func, which have to see operators and transforms, and in the
    reference engine, which can be differentiated twice.
    """
    scale = (scoring.scale,) if isinstance(scoring.scale, Tensor) else ()
    if is_traced(rows, columns) or is_transformed():
        return None, (rows, columns, *scale)
    plan = plans.plan(None, scoring.problem(rows, columns), scoring.call.values["backend"])
    engine, dtype, computed, _ = plan
    if engine.eager:
        return None, (rows, columns, *scale)
    return engine, (rows.to(dtype).to(computed), columns.to(dtype).to(computed), *scale)


def _side(logsumexp: Tensor, weights: Tensor) -> ClipSide:
    """What rows or columns give dL/dS."""
    # One that has no other cells has no weight either, and minus infinity would make it NaN.
    return ClipSide(
        logsumexp.masked_fill(logsumexp == -torch.inf, 0), weights.to(logsumexp.dtype).contiguous()
    )


def _of_all_ranks(batch: Batch, x: Tensor) -> Tensor:
    """What all ranks' rows have, (M,) or (multiples, M), of which this one's, the first, have (..., n)."""
    return _rows_first(batch.gather_constant_own_first, x)


def _rows_first(exchange: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """What ranks exchange, which know rows by the first dimension, of numbers (n,) or (multiples, n)."""
    return exchange(x.movedim(-1, 0).contiguous()).movedim(0, -1).contiguous()


class _PairedSums(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, engine: Engine, scoring: PairScoring, rows: Tensor, columns: Tensor, *scale: Tensor
    ) -> tuple[Tensor, ...]:
        p = scoring.problem(rows, columns, keeps=any(ctx.needs_input_grad))
        positive, row_others, column_others = engine.computation(p).sums(p)
        column_others = _rows_first(scoring.call.batch.log_add_up, column_others)
        ctx.engine, ctx.scoring = engine, _saved(scoring, scale)
        ctx.save_for_backward(rows, columns, row_others, column_others, p.kept, p.mask, *scale)
        return positive, row_others, column_others[..., : len(rows)].clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        scoring: _Saved = ctx.scoring
        check_backward(scoring.function, *upstream)
        rows, columns, row_others, column_others, kept, mask, *scale = ctx.saved_tensors
        of_pairs, of_rows, of_columns = upstream
        of_columns = _of_all_ranks(scoring.batch, of_columns)
        p = scoring.problem(rows, columns, kept, mask, scale)
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
        ctx: Any, engine: Engine, scoring: PairScoring, rows: Tensor, all_rows: Tensor, *scale: Tensor
    ) -> Tensor:
        p = scoring.problem(rows, all_rows, keeps=any(ctx.needs_input_grad))
        sums = engine.computation(p).sums(p).row_others
        ctx.engine, ctx.scoring = engine, _saved(scoring, scale)
        ctx.save_for_backward(rows, all_rows, sums, p.kept, p.mask, *scale)
        return sums.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        scoring: _Saved = ctx.scoring
        check_backward(scoring.function, *upstream)
        rows, all_rows, sums, kept, mask, *scale = ctx.saved_tensors
        own = _side(sums, upstream[0])
        every = ClipSide(*(_of_all_ranks(scoring.batch, x) for x in own))
        p = scoring.problem(rows, all_rows, kept, mask, scale)
        wanted = ctx.needs_input_grad
        # A row is in the scores of its own row and of its own column. The candidates are the same rows.
        found = ctx.engine.computation(p).gradients_from(
            p, own, every, sums.new_zeros(len(rows)), Needs(queries=wanted[2], scale=any(wanted[4:]))
        )
        of_scale = [None if found.scale is None else (found.scale / 2).to(x) for x in scale]
        return None, None, found.queries, None, *of_scale


# torch gives `apply` no types.
_paired_sums: Callable[..., tuple[Tensor, Tensor, Tensor]] = _PairedSums.apply
_own_sums: Callable[..., Tensor] = _OwnSums.apply


class _Saved(NamedTuple):
    """What a backward pass reads of a `PairScoring`, so that its embeddings are freed in time."""

    scale: float | Tensor
    memory: Memory
    batch: Batch
    function: str
    multiples: tuple[float, ...]

    def problem(
        self,
        rows: Tensor,
        columns: Tensor,
        kept: Tensor | None,
        mask: Tensor | None,
        scale: Sequence[Tensor],
    ) -> ClipProblem:
        of_pairs = scale[0] if scale else self.scale
        p = ClipProblem(rows, columns, of_pairs, self.memory, pairs=len(rows), kept=kept)
        p.multiples, p.mask = self.multiples, mask
        return p


def _saved(scoring: PairScoring, scale: tuple[Tensor, ...]) -> _Saved:
    """A scale that is a tensor is saved by autograd, which notices changes in place and frees it."""
    number = 1.0 if scale else scoring.scale
    call = scoring.call
    return _Saved(number, call.values["memory"], call.batch, call.function, scoring.multiples)
