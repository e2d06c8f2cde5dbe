"""Metrics of embeddings during training: neighbours, ranks, cosines of views, alignment, uniformity."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

ROWS = 256  # score rows that are in memory at a time


@torch.no_grad()
def context_accuracy(
    queries: Tensor,  # (N, D)
    candidates: Tensor,  # (N, D)
) -> tuple[float, float]:
    """Forward and backward accuracy of a batch of consecutive sentences, in [0, 1]; both 0 for a single row.

    Forward accuracy is the fraction of rows i < N−1 whose highest score is that of candidate i+1. Backward
    accuracy is the fraction of rows i > 0 whose highest score is that of candidate i−1. The score of a
    sentence with itself is replaced by 0, as in the loss. Random embeddings reach about 1/N. The scores are
    computed 256 rows at a time, in O(256·N) memory.

    Source: the code of Logeswaran and Lee (2018).
    """
    N = len(queries)
    forward = backward = 0
    for begin in range(0, N, ROWS):
        rows = torch.arange(begin, min(begin + ROWS, N), device=queries.device)
        scores = queries[rows] @ candidates.T
        scores[rows - begin, rows] = 0
        best = scores.argmax(dim=1)
        forward += int((best == rows + 1).sum())
        backward += int((best == rows - 1).sum())
    pairs = max(N - 1, 1)
    return forward / pairs, backward / pairs


def view_figures(
    z1: Tensor,  # (N, D)
    z2: Tensor,  # (N, D)
    *,
    mix: float,
    partners: Tensor | None = None,  # (N,)
    mixes_unit_rows: bool = True,
    negatives: Sequence[Tensor] = (),  # (N, D) each
) -> dict[str, float]:
    """The figures that the slides of MixCSE plot over training: mean cosines, alignment and uniformity.

    Args:
        z1, z2: the first and the second view of each sentence.
        mix: the weight of the sentence's own second view in its mixed negative.
        partners: the sentence whose second view the mixed negative of each sentence takes; a number outside
            0..N-1 for one that is not here. By default the next sentence, and the first one for the last.
        mixes_unit_rows: mix second views at norm 1, as the slides do. The authors' code mixes them as they
            are.
        negatives: hard negatives of the sentences.

    Returns:
        A dict of figures, all computed in float64; but for the mixtures, from rows at norm 1:
        positive_cosine: mean cosine of the two views of a sentence;
        negative_cosine: mean cosine of a first view and the second view of another sentence;
        mixed_cosine: mean cosine of a first view and the sentence's mixed negative, which is `mix` times its
        own second view plus 1 - `mix` times its partner's, over the sentences whose partner is here; without
        any, this figure is left out;
        hard_negative_cosine: mean cosine of a first view and the sentence's hard negatives, if there are any;
        alignment: mean squared distance of the two views of a sentence;
        uniformity: `uniformity` of the first views.

    Source: Zhang et al. (AAAI 2022); alignment and uniformity: Wang and Isola (2020).
    """
    z1, z2 = z1.double(), z2.double()
    unit, N = F.normalize(z2, dim=1), len(z1)
    if partners is None:
        partners = torch.arange(1, N + 1, device=z1.device) % max(N, 1)

    here = (partners >= 0) & (partners < N)
    mixable = unit if mixes_unit_rows else z2

    z1, z2 = F.normalize(z1, dim=1), unit

    positive = (z1 * z2).sum(1)
    mixed = F.normalize(mix * mixable[here] + (1 - mix) * mixable[partners[here]], dim=1)
    mixed_cosines = (z1[here] * mixed).sum(1)

    pairs = max(N * (N - 1), 1)

    hard = [(z1 * F.normalize(z.double(), dim=1)).sum(1) for z in negatives]

    return {
        "positive_cosine": positive.mean().item(),
        "negative_cosine": ((z1.sum(0) @ z2.sum(0) - positive.sum()) / pairs).item(),
        **({"mixed_cosine": mixed_cosines.mean().item()} if len(mixed) else {}),
        **({"hard_negative_cosine": torch.stack(hard).mean().item()} if hard else {}),
        "alignment": (z1 - z2).square().sum(1).mean().item(),
        "uniformity": uniformity(z1),
    }


@torch.no_grad()
def ranking_figures(
    queries: Tensor,  # (N, D)
    documents: Sequence[Tensor],  # (N, D) each, of which the first are the positives
) -> dict[str, float]:
    """How well queries find their positives among all documents of a batch, by cosine.

    The rank of query i is 1 plus the number of documents whose cosine with it is higher than that of its
    positive. The cosines are computed 256 rows at a time, in O(256·M) memory for M documents.

    Returns:
        A dict of figures: accuracy, the share of queries with rank 1; mrr, the mean of 1 / rank; chance, the
        accuracy of a guess.
    """
    queries, candidates = F.normalize(queries, dim=1), F.normalize(torch.cat([*documents]), dim=1)

    ranks = []
    for begin in range(0, len(queries), ROWS):
        rows = torch.arange(begin, min(begin + ROWS, len(queries)), device=queries.device)
        cosines = queries[rows] @ candidates.T
        positive = cosines[rows - begin, rows]
        ranks.append(1 + (cosines > positive[:, None]).sum(1))
    rank = torch.cat(ranks).double()

    return {
        "accuracy": (rank == 1).double().mean().item(),
        "mrr": rank.reciprocal().mean().item(),
        "chance": 1 / len(candidates),
    }


def uniformity(x: Tensor, t: float = 2.0) -> float:
    """log E exp(−t‖xᵢ − xⱼ‖²), the mean taken over all pairs of different rows (N, D); 0 for one row.

    For rows at norm 1, a lower value means that they are spread more evenly over the sphere. The distances
    are computed 256 rows at a time.

    Source: Wang and Isola, "Understanding contrastive representation learning through alignment and
    uniformity on the hypersphere" (2020).
    """
    N = len(x)
    norms = x.square().sum(1)

    total = 0.0
    for begin in range(0, N, ROWS):
        rows = torch.arange(begin, min(begin + ROWS, N), device=x.device)
        squares = norms[rows, None] + norms - 2 * x[rows] @ x.T
        kernel = torch.exp(-t * squares.clamp(min=0))
        kernel[rows - begin, rows] = 0
        total += float(kernel.sum())
    return math.log(total / (N * (N - 1))) if N > 1 else 0.0
