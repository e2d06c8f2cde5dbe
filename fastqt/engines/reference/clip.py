"""A rectangle of CLIP's scores in plain PyTorch: what an engine finds of it, in O(N * M) memory."""

from __future__ import annotations

import torch
from torch import Tensor

from fastqt.devices import accumulation_dtype
from fastqt.problem import (
    ClipProblem,
    ClipSide,
    ClipSums,
    Gradients,
    Inputs,
    Needs,
    finite_scale,
    positive_scores,
)


def sums(p: ClipProblem) -> ClipSums:
    """The score of each pair of a rectangle, and the logsumexps of all other cells."""
    products = _products(p)
    scores = finite_scale(p.scale) * products.to(accumulation_dtype(p.queries.device))
    own = _pairs_of(p, scores)
    positive = positive_scores(own)
    own.fill_(float("-inf"))
    of_sides = []
    for dim, leaving in zip((1, 0), _leaving(p, products), strict=True):
        others = scores if leaving is None else scores.masked_fill(leaving, float("-inf"))
        of_sides.append(torch.stack([(multiple * others).logsumexp(dim) for multiple in p.multiples]))
    row_others, column_others = of_sides
    return ClipSums(positive, row_others.squeeze(0), column_others.squeeze(0))


def _leaving(p: ClipProblem, products: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The cells that leave the softmaxes of rows, and those of columns; None where none does."""
    rows, columns = p.mask, p.mask if p.column_mask is None else p.column_mask
    if p.thresholds is None:
        return rows, columns
    above = [products > limits for limits in (p.thresholds[:, None], p.thresholds)]
    rows, columns = (x if mask is None else x | mask for x, mask in zip(above, (rows, columns), strict=True))
    return rows, columns


def gradients_from(
    p: ClipProblem, rows: ClipSide, columns: ClipSide, pairs: Tensor, needs: Needs
) -> Gradients:
    """The gradients of a rectangle, of which dL/dS is `pairs` at the pairs and the sides' elsewhere."""
    scale, products = finite_scale(p.scale), _products(p)
    scores = scale * products.to(accumulation_dtype(p.queries.device))
    of_scores = torch.zeros_like(scores)
    for multiple, *sides in zip(p.multiples, *map(_of_each, (*rows, *columns)), strict=True):
        row_logsumexp, row_weights, column_logsumexp, column_weights = sides
        several = multiple * scores
        of_rows = multiple * row_weights[:, None] * (several - row_logsumexp[:, None]).exp_()
        of_columns = multiple * column_weights * (several - column_logsumexp).exp_()
        for part, leaving in zip((of_rows, of_columns), _leaving(p, products), strict=True):
            of_scores += part if leaving is None else part.masked_fill_(leaving, 0)
    _pairs_of(p, of_scores).copy_(pairs)
    of_products = (scale * of_scores).to(p.queries.dtype)
    return Inputs(
        queries=of_products @ p.candidates if needs.queries else None,
        candidates=of_products.T @ p.queries if needs.candidates else None,
        scale=(of_scores * products).sum() if needs.scale else None,
    )


def _of_each(x: Tensor) -> Tensor:
    """What each multiple of the scores has of a side, (multiples, n)."""
    return x if x.dim() == 2 else x[None]


def _products(p: ClipProblem) -> Tensor:
    return p.queries @ p.candidates.T


def _pairs_of(p: ClipProblem, cells: Tensor) -> Tensor:
    """A view of the cells (N, M) that are pairs."""
    return cells.diagonal()[: len(cells) if p.pairs is None else p.pairs]
