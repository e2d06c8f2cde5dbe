"""Cells that one row alone has: scores that are given, and several negatives a row, which are scored here.

An engine knows one such cell a row. The scores of several are joined before it by their logsumexp; of a
sigmoid their losses are added to the rows' after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastqt.devices import accumulation_dtype
from fastqt.functional.call import Call, Completion
from fastqt.negatives import Mixed, mixed_rows
from fastqt.norms import LEAST_NORM
from fastqt.problem import loss_dtype, reduce, unit_rows
from fastqt.torch_modes import input_dtype, is_traced, is_transformed, without_autocast

# Of row negatives in the dtype of the computation. On a CPU they stay in the cache.
CHUNK_BYTES, CPU_CHUNK_BYTES = 16 * 2**20, 2**20


def one_cell_a_row(call: Call) -> tuple[Call, Completion | None]:
    """The call with at most one cell that a row has alone: its row negative, or else its row score."""
    rows = call.row_negatives
    if rows is None and call.row_scores is None:
        return call, None
    if isinstance(rows, Tensor) and rows.dim() == 3 and rows.shape[1] == 1:
        rows = rows.squeeze(1)
        call = replace(call, row_negatives=rows)
    one = call.row_scores is None and (not isinstance(rows, Tensor) or rows.dim() == 2)
    # The engines score one row negative, or one mixture, and compare it with a threshold.
    if one and not call.spares_row_negatives and call.is_padding is None:
        return call, None

    if rows is not None:
        call = replace(call, scale=added_up_in_float64(call.scale))
    cells = [x.to(loss_dtype(call.queries)) for x in cells_alone(call)]
    if call.link == "sigmoid" and (len(cells) > 1 or cells[0].shape[1] > 1):
        losses = F.softplus(torch.cat(cells, 1), threshold=50).sum(1)
        if call.matryoshka is not None:  # each of which has these cells
            losses = losses * sum(call.matryoshka.weights)
        return with_cells(call, None), lambda loss: loss + reduce(losses, call.reduction)
    return with_cells(call, joined(*cells).contiguous()), None


def joins_cells(call: Call) -> bool:
    """Whether a row's negatives, or mixtures, become one score with its other cells."""
    rows = call.row_negatives
    several = isinstance(rows, Tensor) and rows.dim() == 3 and rows.shape[1] > 1
    alone = call.row_scores is not None or call.spares_row_negatives or call.is_padding is not None
    return several or (rows is not None and alone)


def cells_alone(call: Call) -> list[Tensor]:
    """The scores of the cells that each row has alone, of each kind (N, K)."""
    cells = [] if call.row_scores is None else [columns_of(call.row_scores)]
    if call.row_negatives is not None:
        cells.append(scores_of_row_negatives(call))
    return cells


def with_cells(call: Call, scores: Tensor | None) -> Call:
    """The call whose rows have cells alone of these scores, (N,) or (N, K), in place of their own."""
    return replace(call, row_negatives=None, is_padding=None, row_scores=scores)


def joined(first: Tensor, *others: Tensor) -> Tensor:
    """The logsumexp of each row of some scores (N, K), (N,); -inf with a gradient of 0 where all are -inf."""
    if not others and first.shape[1] == 1:
        return first[:, 0]
    # From more digits it is rounded once, and the gradients of its parts add up to its own.
    cells = torch.cat([x.to(accumulation_dtype(x.device)) for x in (first, *others)], 1)
    none = cells.detach().isneginf().all(1)
    found = cells.masked_fill(none[:, None], 0).logsumexp(1)
    return found.masked_fill(none, -torch.inf).to(first.dtype)


def added_up_in_float64(scale: float | Tensor) -> float | Tensor:
    """A scale whose gradient is rounded once its parts, which may cancel each other, are added up."""
    return scale.to(accumulation_dtype(scale.device)) if isinstance(scale, Tensor) else scale


def columns_of(row_scores: Tensor) -> Tensor:
    """Row scores (N,) or (N, K) as (N, K)."""
    return row_scores[:, None] if row_scores.dim() == 1 else row_scores


def scores_of_row_negatives(call: Call) -> Tensor:
    """The scores of row negatives (N, D) or (N, K, D), or of mixtures, (N, K), without a copy."""
    queries, candidates, rows, normalize = call.queries, call.candidates, call.row_negatives, call.normalize
    read_as, euclidean = input_dtype(queries), call.similarity == "euclidean"
    assert rows is not None
    as_they_are = not normalize
    with without_autocast(queries):
        f = queries.to(read_as).to(loss_dtype(queries))
        if isinstance(rows, Mixed):
            partners = rows.partners_of(len(queries), len(candidates), queries.device)
            mixed_from = candidates.to(read_as).to(loss_dtype(candidates))
            rows = mixed_rows(unit_rows(mixed_from) if normalize else mixed_from, rows.mix, partners)
            read_as, as_they_are = rows.dtype, True
        rows = rows[:, None] if rows.dim() == 2 else rows
        # The square of a number that float32 holds is one of float64.
        f = F.normalize(f.to(accumulation_dtype(f.device)), dim=1).to(f.dtype) if normalize else f

        if is_transformed() or is_traced(queries, rows):
            similar = _similar(f, rows.to(read_as).to(f.dtype), not as_they_are, euclidean)
        else:
            similar = _similar_in_chunks(f, rows, read_as, not as_they_are, euclidean)
        scores = similar * call.scale
        if call.is_padding is not None:
            scores = scores.masked_fill(call.is_padding, -torch.inf)
        if call.thresholds is None or call.spares_row_negatives:
            return scores
        return scores.masked_fill(similar.detach() > call.thresholds[:, None], -torch.inf)


def _similar(queries: Tensor, rows: Tensor, normalize: bool, euclidean: bool) -> Tensor:
    """Products of queries (N, D) and their own rows (N, K, D), or minus their squared distances, (N, K).

    The queries have norm 1 already where rows are normalised.
    """
    if euclidean:
        exact = rows.to(accumulation_dtype(rows.device))
        rows = F.normalize(exact, dim=2).to(rows.dtype) if normalize else rows
        return -(rows - queries[:, None]).square().sum(2)
    products = (rows @ queries[:, :, None]).squeeze(2)
    if not normalize:
        return products
    norms: Tensor = torch.linalg.vector_norm(rows, dim=2, dtype=accumulation_dtype(rows.device))
    return (products / norms.clamp(min=LEAST_NORM)).to(products.dtype)


class _Similar(torch.autograd.Function):
    """`_similar` of a few rows at a time, which are computed once more to be differentiated."""

    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, rows: Tensor, read_as: torch.dtype, normalize: bool, euclidean: bool
    ) -> Tensor:
        ctx.save_for_backward(queries, rows)
        ctx.read_as, ctx.how = read_as, (normalize, euclidean)
        similar = queries.new_empty(rows.shape[:2])
        for here in _chunks(queries, rows):
            read = rows[here].to(read_as).to(queries.dtype)
            similar[here] = _similar(queries[here], read, normalize, euclidean)
        return similar

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        inputs, wanted = ctx.saved_tensors, ctx.needs_input_grad[:2]
        if torch.is_grad_enabled():  # A double backward records all rows at once.
            return (*_differentiated(ctx, inputs, upstream[0], wanted, again=True), None, None, None)
        gradients = [x.new_empty(x.shape) if want else None for x, want in zip(inputs, wanted, strict=True)]
        queries, rows = inputs
        for here in _chunks(queries, rows):
            read = rows[here].to(ctx.read_as).to(queries.dtype)
            with without_autocast(queries):
                parts = _gradients(queries[here], read, upstream[0][here], *ctx.how)
            for to, part in zip(gradients, parts, strict=True):
                if to is not None:
                    to[here] = part
        return (*gradients, None, None, None)


# torch gives `apply` no types.
_similar_in_chunks: Callable[..., Tensor] = _Similar.apply


def _differentiated(
    ctx: Any, inputs: Any, upstream: Tensor, wanted: Any, *, again: bool
) -> list[Tensor | None]:
    queries, rows = inputs
    found = _similar(queries, rows.to(ctx.read_as).to(queries.dtype), *ctx.how)
    needed = [x for x, want in zip(inputs, wanted, strict=True) if want]
    gradients = iter(torch.autograd.grad(found, needed, upstream, create_graph=again))
    return [next(gradients) if want else None for want in wanted]


def _gradients(
    queries: Tensor, rows: Tensor, upstream: Tensor, normalize: bool, euclidean: bool
) -> tuple[Tensor, Tensor]:
    """Those of `_similar` by the queries and by their rows."""
    if euclidean:
        with torch.enable_grad():
            queries, rows = (x.detach().requires_grad_() for x in (queries, rows))
            similar = _similar(queries, rows, normalize, euclidean)
        d_queries, d_rows = torch.autograd.grad(similar, (queries, rows), upstream)
        return d_queries, d_rows
    weights = upstream
    if normalize:
        exact = upstream.to(accumulation_dtype(rows.device))
        norms = torch.linalg.vector_norm(rows, dim=2, dtype=exact.dtype)
        exact = exact / norms.clamp(min=LEAST_NORM)
        weights = exact.to(rows.dtype)
    d_rows = weights[:, :, None] * queries[:, None]
    if normalize:
        # What points along a row at its norm changes no cosine. A shorter row is divided by a constant.
        along = exact * (rows @ queries[:, :, None]).squeeze(2) / norms.square()
        along = along.masked_fill(norms < LEAST_NORM, 0).to(rows.dtype)
        d_rows.addcmul_(along[:, :, None], rows, value=-1)
    return (weights[:, None] @ rows).squeeze(1), d_rows


def _chunks(queries: Tensor, rows: Tensor) -> Iterator[slice]:
    """Some queries and their rows at a time."""
    N, K, D = rows.shape
    chunk = CPU_CHUNK_BYTES if queries.is_cpu else CHUNK_BYTES
    height = max(chunk // (K * D * queries.element_size()), 1)
    for start in range(0, N, height):
        yield slice(start, start + height)
