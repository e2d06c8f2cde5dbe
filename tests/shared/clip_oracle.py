"""CLIP's loss in numpy float64, and the same from rectangles of its scores, assembled as processes do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastqt.problem import ClipProblem, ClipSide, Gradients, Needs

Array = np.ndarray
ALL = Needs(queries=True, candidates=True, scale=True)


def clip(a: Array, b: Array, scale: float, weights: Array, normalize: bool) -> tuple[Array, ...]:
    """sum_i weights_i loss_i, and its gradients with respect to a, b and the scale.

    The gradient at a pair's score is minus the sum of the others' probabilities, which keeps its digits.
    """
    norms = [np.linalg.norm(x, axis=1, keepdims=True) if normalize else np.ones((len(x), 1)) for x in (a, b)]
    u, v = a / norms[0], b / norms[1]
    cosines = u @ v.T
    of_rows, of_columns = (_softmax(scale * x) for x in (cosines, cosines.T))
    loss = (weights * (of_rows[0] + of_columns[0]) / 2).sum()
    dS = (weights[:, None] * of_rows[1] + weights * of_columns[1].T) / 2
    du, dv = scale * dS @ v, scale * dS.T @ u
    if normalize:
        du = (du - u * (u * du).sum(1, keepdims=True)) / norms[0]
        dv = (dv - v * (v * dv).sum(1, keepdims=True)) / norms[1]
    return loss, du, dv, (dS * cosines).sum()


def _softmax(scores: Array) -> tuple[Array, Array]:
    """The cross entropy of each row with its diagonal cell, and its gradient."""
    others = np.exp(scores - scores.diagonal()[:, None])
    np.fill_diagonal(others, 0)
    odds = others.sum(1)
    gradient = others / (1 + odds)[:, None]
    np.fill_diagonal(gradient, -odds / (1 + odds))
    return np.log1p(odds), gradient


def assembled(
    module: Any,
    shards: Sequence[tuple[Tensor, Tensor]],  # the rows of a and of b that each process has
    scale: Tensor,
    weights: Array,  # (N,)
    *,
    blocks: bool,
    needs: Needs = ALL,
    **options: Any,
) -> tuple[Any, ...]:
    """What `clip` returns, from an engine's `sums` and `gradients_from` for rectangles of the scores.

    A process's rectangles have all columns at once, its own first, or with `blocks` those of one shard each.
    """
    sizes = [len(a) for a, _ in shards]
    spans = [np.arange(stop - size, stop) for size, stop in zip(sizes, np.cumsum(sizes), strict=True)]
    P, N = len(shards), sum(sizes)
    positive = np.empty(N)
    row_others, column_others = np.full(N, -np.inf), np.full(N, -np.inf)
    rectangles = []
    for r, (a, _) in enumerate(shards):
        order = [(r + k) % P for k in range(P)]
        for parts in [[s] for s in order] if blocks else [order]:
            columns = np.concatenate([spans[s] for s in parts])
            b = torch.cat([shards[s][1] for s in parts])
            p = ClipProblem(a, b, scale, pairs=sizes[r] if parts[0] == r else 0, **options)
            rectangles.append((p, spans[r], columns))
            found = module.sums(p)
            assert all(x.dtype is torch.float64 for x in found)
            positive[spans[r][: len(found.positive)]] = found.positive.numpy()
            row_others[spans[r]] = np.logaddexp(row_others[spans[r]], found.row_others.numpy())
            column_others[columns] = np.logaddexp(column_others[columns], found.column_others.numpy())
    of_rows, of_columns = (np.logaddexp(positive, x) for x in (row_others, column_others))
    pairs = -weights / 2 * (np.exp(row_others - of_rows) + np.exp(column_others - of_columns))
    losses = np.logaddexp(0, row_others - positive) + np.logaddexp(0, column_others - positive)

    D = shards[0][0].shape[1]
    da, db, dscale = torch.zeros(N, D).double(), torch.zeros(N, D).double(), 0.0
    for p, rows, columns in rectangles:
        given: Gradients = module.gradients_from(
            *(p, _side(of_rows, weights, rows), _side(of_columns, weights, columns)),
            *(torch.from_numpy(pairs[rows][: p.pairs]), needs),
        )
        assert [x is not None for x in given] == [bool(need) for need in needs]
        assert {x.dtype for x in given[:2] if x is not None} <= {p.queries.dtype}
        da[rows] += 0 if given.queries is None else given.queries.double()
        db[columns] += 0 if given.candidates is None else given.candidates.double()
        dscale += 0 if given.scale is None else float(given.scale)
    return (weights * losses / 2).sum(), da, db, dscale


def _side(logsumexp: Array, weights: Array, at: Array) -> ClipSide:
    return ClipSide(torch.from_numpy(logsumexp[at]), torch.from_numpy(weights[at] / 2))
