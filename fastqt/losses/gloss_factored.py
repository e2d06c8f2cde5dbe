"""The algorithm of GLOSS's positional loss, at about the cost of its bags of words for any sentence length.

The score of a word at a position is the sum of a score by the sentence and a score by the position. Its
exponential is therefore a product, and the sums over words in the softmax, for all sentences and positions,
are one matrix product of the exponentials of (B, V) and (L, V) scores. The sums over positions and over
sentences in its gradients are products too. The (B, L, V) scores are never formed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor
from typing_extensions import NamedTuple

from fastqt.autograd.walked import Walked, adding
from fastqt.devices import accumulation_dtype
from fastqt.engines.own_products import multiply, product
from fastqt.fields import Differentiable

CHUNK_BYTES = 24 * 2**20  # of the sentences' scores
# Each term of a sum of exponentials is at most 1. In a sum below this bound, terms that float32 has lost
# could matter.
LEAST_SUM = 1e-25


class ScoresTooFarApartError(Exception):
    """A sentence favours words that a position rules out, so that the products of exponentials underflow."""


@dataclass
class PositionScores:
    """What depends on the decoder alone."""

    scores: Tensor  # (L, V), without the bias
    highest: Tensor  # (L,)
    exps: Tensor  # (L, V), of the scores less the highest one


@torch.no_grad()
def score_positions(positions: Tensor, weight: Tensor) -> PositionScores:
    """The scores that positions (L, d) give to words (V, d)."""
    scores = product(positions, weight.T)
    highest = scores.amax(1)
    return PositionScores(scores, highest, (scores - highest[:, None]).exp_())


T = TypeVar("T")


class PositionalInputs(NamedTuple, Generic[T]):
    """Something of each input of a `PositionalProblem` that there are gradients of."""

    queries: T | None = None
    positions: T | None = None
    weight: T | None = None
    bias: T | None = None


PositionalGradients = PositionalInputs[Tensor]


@dataclass
class PositionalProblem(Differentiable):
    """Which word is at each position of each sentence, in float32 or float64."""

    queries: Tensor  # (B, d), the latent vectors
    positions: Tensor  # (L, d)
    weight: Tensor  # (V, d)
    bias: Tensor  # (V,)
    ids: Tensor  # (B, L) int64 in [0, V), 0 beyond a sentence's length
    within: Tensor  # (B, L) bool: whether the sentence has this position
    position_scores: PositionScores
    mean: bool = False  # over a sentence's positions, in place of their sum

    needs_type: ClassVar[type[Any]] = PositionalInputs


def _walk(p: PositionalProblem, row_weights: Tensor | None, gradients: PositionalGradients) -> Tensor:
    """The loss of each sentence, (B,); adds the gradients of sum_i row_weights_i loss_i."""
    dlatents, dpositions, dweight, dbias = gradients
    places, weight = p.position_scores, p.weight
    dtype = accumulation_dtype(p.queries.device)
    of_position = 1 / p.within.sum(1).clamp(min=1).to(dtype) if p.mean else None
    if row_weights is not None:
        row_weights = row_weights.to(p.queries.dtype)
    if of_position is not None and row_weights is not None:
        row_weights = row_weights * of_position.to(row_weights.dtype)

    losses = p.queries.new_empty(len(p.ids), dtype=dtype)
    # Sums over sentences of the positions' probabilities, before the factor that the position gives.
    sums = torch.zeros_like(places.scores) if dpositions is not None or dweight is not None else None
    step = max(CHUNK_BYTES // (len(weight) * weight.element_size()), 16)
    # Chunks share this memory: matrices of their own would be alive together with those of the one before.
    space = p.queries.new_empty(1 if row_weights is None else 2, min(step, len(p.ids)), len(weight))

    for begin in range(0, len(p.ids), step):
        rows = slice(begin, begin + step)
        z, words, inside = p.queries[rows], p.ids[rows], p.within[rows]
        scores = multiply(space[0, : len(z)], z, weight.T).add_(p.bias)
        own = scores.gather(1, words) + places.scores.gather(1, words.T).T
        highest = scores.amax(1, keepdim=True)

        exps = scores.sub_(highest).exp_()
        totals = product(exps, places.exps.T)
        if bool((totals < LEAST_SUM).logical_and_(inside).any()):
            raise ScoresTooFarApartError
        found = (highest + places.highest) + totals.log() - own
        losses[rows] = found.where(inside, 0).sum(1, dtype=dtype)
        if row_weights is None:
            continue

        counts = inside.to(z.dtype) * row_weights[rows, None]
        shares = (row_weights[rows, None] / totals).where(inside, 0)
        if sums is not None:
            multiply(sums, shares.T, exps, add=True)
        if dlatents is None and dweight is None and dbias is None:
            continue

        dscores = multiply(space[1, : len(z)], shares, places.exps)
        dscores.mul_(exps).scatter_add_(1, words, -counts)
        if dlatents is not None:
            multiply(dlatents[rows], dscores, weight)
        if dweight is not None:
            multiply(dweight, dscores.T, z, add=True)
        if dbias is not None:
            dbias += dscores.sum(0)

    if sums is not None and row_weights is not None:
        counts = p.within.to(sums.dtype) * row_weights[:, None]
        dscores = sums.mul_(places.exps).scatter_add_(1, p.ids.T, -counts.T)
        if dpositions is not None:
            multiply(dpositions, dscores, weight, add=True)
        if dweight is not None:
            multiply(dweight, dscores.T, p.positions, add=True)
    return losses if of_position is None else losses * of_position


FACTORED = Walked(adding(_walk))  # Each of its functions may raise ScoresTooFarApartError.
