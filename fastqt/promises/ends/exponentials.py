"""Exponentials of scores, their sums over rows and the logarithm of these."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fastqt.functional import log_sum_exp
from fastqt.promises.ends.arguments import columns_of, computed, like
from fastqt.promises.promise import Promise, known
from fastqt.promises.rules import RULES
from fastqt.promises.scores import Exponentials, RowTerms, Scores, replace
from fastqt.promises.terms import LogSumExp, RowTerm

T = Tensor
rule = RULES.rule


@rule(T.logsumexp, torch.logsumexp)
def logsumexp(s: Any, dim: Any, keepdim: bool = False) -> Any:
    scores = known(s, Scores)
    dim = dim[0] if isinstance(dim, tuple | list) and len(dim) == 1 else dim
    if scores is None or dim not in (0, 1, -1, -2):
        return NotImplemented
    if dim in (0, -2):
        alone = scores.alone
        turned = None if alone is None else alone.transposed()
        if turned is None:
            return NotImplemented
        scores = Scores((turned,))
    sums = logsumexp_of(scores)
    return sums if sums is NotImplemented else like(sums.unsqueeze(dim) if keepdim else sums, s)


def logsumexp_of(scores: Scores) -> Any:
    columns = columns_of(scores)
    sums = NotImplemented if columns is None else computed(log_sum_exp, **columns.options)
    if sums is NotImplemented or scores.row is None:
        return sums
    return sums + scores.row.computed()[:, 0]


def sums_of_exponentials(s: Promise, scores: Scores, keepdim: bool) -> RowTerm | None:
    """The sum of each row as a promise, of which a program may want the logarithm alone."""
    if len(scores.blocks) > 1 or torch.is_autocast_enabled(s.device.type) or columns_of(scores) is None:
        return None
    state, of_cells, dtype = s.box.state, replace(scores, row=None), s.dtype

    def sums() -> Tensor:
        computed: Any = logsumexp_of(of_cells)
        if isinstance(computed, Tensor):
            return computed[:, None]
        of_all = state.computed().sum(1, keepdim=True).log()
        return of_all if scores.row is None else of_all - scores.row.computed()

    terms = RowTerms(()) if scores.row is None else scores.row
    terms = RowTerms(((1.0, LogSumExp(of_cells, sums, state)), *terms.terms))
    return RowTerm(
        size=(scores.shape[0], 1) if keepdim else scores.shape[:1],
        dtype=dtype,
        terms=terms,
        is_exp=True,
        part=lambda: terms.computed().exp().to(dtype),
        by="fastqt.log_sum_exp",
    )


def where_one(scores: Scores, ones: Tensor) -> Any:
    """Exponentials of scores where ones are, and of minus infinity where zeros are."""
    if len(scores.blocks) > 1 or scores.first.diagonal == "zero":
        return NotImplemented
    p = scores.first
    mask = ones == 0
    # In a row without a one the logsumexp of nothing has no gradient.
    mask = mask if p.mask is None else p.mask | mask
    if p.diagonal != "keep" or bool(mask.all(1).any()):
        return NotImplemented
    masked = replace(p, mask=mask, stands_for=-math.inf)
    return Exponentials(replace(scores, blocks=(masked,)))
