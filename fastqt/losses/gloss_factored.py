"""GLOSS's positional loss for about what its bags of words cost, whatever the length of sentences.

The score of a word at a place is the sum of one that the sentence gives it and one that the place does. So
its exponential is a product, and the sum over words that a softmax divides by, for all sentences and
places, one matrix product of the exponentials of (B, V) and (L, V) scores; likewise the sums over places
and over sentences in its gradients. No score of a word at a sentence's place is ever formed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

CHUNK_BYTES = 24 * 2**20  # of sentences' scores
# Below this, terms too small for float32 could be felt in a sum of exponentials, each at most 1.
LEAST_SUM = 1e-25


class Places(NamedTuple):
    """What depends on the decoder alone."""

    scores: Tensor  # (L, V), less the bias
    highest: Tensor  # (L,)
    exps: Tensor  # (L, V), of the scores less the highest


@torch.no_grad()
def score_places(positions: Tensor, weight: Tensor) -> Places:
    """The scores that places (L, d) give to words (V, d)."""
    scores = positions @ weight.T
    highest = scores.amax(1)
    return Places(scores, highest, (scores - highest[:, None]).exp_())


def positional_loss(
    latents: Tensor,  # (B, d)
    positions: Tensor,  # (L, d)
    weight: Tensor,  # (V, d)
    bias: Tensor,  # (V,)
    token_ids: Tensor,  # (B, L) int64 in [0, V), within the lengths
    lengths: Tensor,  # (B,) int64 in [0, L]
    places: Places | None = None,  # score_places(positions, weight), if it is at hand
) -> Tensor | None:
    """`fastqt.gloss_pos_loss` with reduction="sum", in float32 or float64; differentiable once.

    None where scores of sentences and of places are so far apart that their exponentials' products would
    lose what matters: then each score has to be formed.
    """
    within = torch.arange(len(positions), device=lengths.device) < lengths[:, None]
    ids = token_ids.where(within, 0)
    apply: Callable[..., Tensor | None] = _PositionalLoss.apply  # torch gives `apply` no types
    return apply(latents, positions, weight, bias, ids, within, places or score_places(positions, weight))


class _PositionalLoss(torch.autograd.Function):
    """Takes its gradients in the forward pass, as the exponentials are at hand there."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor | None:
        parameters = inputs[:4]
        needs = ctx.needs_input_grad[:4]
        ctx.gradients = [
            torch.zeros_like(x) if need else None for x, need in zip(parameters, needs, strict=True)
        ]
        return _walk(*inputs, *ctx.gradients)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "positional_loss has no second derivative: take the first without create_graph"
            )
        return *(g if g is None else g * upstream[0] for g in ctx.gradients), None, None, None


def _walk(
    latents: Tensor,
    positions: Tensor,
    weight: Tensor,
    bias: Tensor,
    ids: Tensor,  # (B, L), 0 beyond a sentence's length
    within: Tensor,  # (B, L) bool
    places: Places,
    dlatents: Tensor | None,
    dpositions: Tensor | None,
    dweight: Tensor | None,
    dbias: Tensor | None,
) -> Tensor | None:
    """The loss; adds its gradients to those given."""
    loss = torch.zeros((), dtype=torch.float64, device=latents.device)
    sums = torch.zeros_like(places.scores) if dpositions is not None or dweight is not None else None
    rows = max(CHUNK_BYTES // (len(weight) * weight.element_size()), 16)
    for z, words, inside, begin in zip(
        *(x.split(rows) for x in (latents, ids, within)), range(0, len(ids), rows), strict=True
    ):
        scores = torch.addmm(bias, z, weight.T)
        own = scores.gather(1, words) + places.scores.gather(1, words.T).T
        highest = scores.amax(1, keepdim=True)
        exps = scores.sub_(highest).exp_()
        totals = exps @ places.exps.T
        if bool((totals < LEAST_SUM).logical_and_(inside).any()):
            return None
        losses = (highest + places.highest) + totals.log() - own
        loss += losses.where(inside, 0).double().sum()
        counts = inside.to(z.dtype)
        shares = (1 / totals).where(inside, 0)
        if sums is not None:
            sums.addmm_(shares.T, exps)
        if dlatents is None and dweight is None and dbias is None:
            continue
        dscores = (shares @ places.exps).mul_(exps).scatter_add_(1, words, -counts)
        if dlatents is not None:
            torch.mm(dscores, weight, out=dlatents[begin : begin + rows])
        if dweight is not None:
            dweight.addmm_(dscores.T, z)
        if dbias is not None:
            dbias += dscores.sum(0)
    if sums is not None:
        dplaces = sums.mul_(places.exps).scatter_add_(1, ids.T, -within.T.to(sums.dtype))
        if dpositions is not None:
            dpositions.addmm_(dplaces, weight)
        if dweight is not None:
            dweight.addmm_(dplaces.T, positions)
    return loss.to(latents.dtype)
