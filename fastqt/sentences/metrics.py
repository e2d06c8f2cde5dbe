"""Metrics of embeddings during training: neighbours, ranks, cosines of views, alignment, uniformity."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

ROWS = 256  # score rows that are in memory at a time
ROUNDING = 4  # units in the last place of a product of norms, by which equal scores may differ


@torch.no_grad()
def context_accuracy(
    queries: Tensor,  # (N, D)
    candidates: Tensor,  # (N, D)
) -> tuple[float, float]:
    """Forward and backward accuracy of a batch of consecutive sentences, in [0, 1]; both 0 for a single row.

    Forward accuracy is the fraction of rows i < N−1 whose highest score is that of candidate i+1. Backward
    accuracy is the fraction of rows i > 0 whose highest score is that of candidate i−1. Where t scores are
    the highest, each of them is chosen once in t times, so a row counts 1 / t. The score of a sentence with
    itself is replaced by 0, as in the loss. Random embeddings, and equal ones, reach about 1/N. The scores
    are computed 256 rows at a time, in O(256·N) memory.

    Source: the code of Logeswaran and Lee (2018).
    """
    queries, candidates = _wide(queries), _wide(candidates)
    N = len(queries)
    rounding = _rounding(queries, candidates)

    forward = backward = torch.zeros((), dtype=torch.float64, device=queries.device)
    for begin in range(0, N, ROWS):
        rows = torch.arange(begin, min(begin + ROWS, N), device=queries.device)
        scores = queries[rows] @ candidates.T
        scores[rows - begin, rows] = 0

        highest = scores >= scores.amax(dim=1, keepdim=True) - rounding[rows, None]
        share = 1 / highest.sum(dim=1).clamp(min=1).double()  # of each one; none is the highest beside NaN
        forward = forward + (share * _of_column(highest, rows + 1)).sum()
        backward = backward + (share * _of_column(highest, rows - 1)).sum()
    pairs = max(N - 1, 1)
    return forward.item() / pairs, backward.item() / pairs


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
        A dict of figures, computed in float64 from rows at norm 1, but for the mixtures: mean cosines of
        the two views of a sentence, of views of different sentences, of a first view and the sentence's
        mixed negative, if partners are here, and of a first view and hard negatives, if there are any;
        alignment, the mean squared distance of the two views; and `uniformity` of the first views.

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
    positive. Where t documents, the positive among them, have the same cosine and b have a higher one, the
    figures are means over all orders of the t: its rank is each of b+1 … b+t as often. So the query is the
    first 1 / t times if b is 0, and its reciprocal rank is (H(b+t) − H(b)) / t, with the harmonic numbers H.
    The cosines are computed 256 rows at a time, in O(256·M) memory for M documents.

    Returns:
        A dict of figures: accuracy, the share of queries with rank 1; mrr, the mean of 1 / rank; chance, the
        accuracy of a guess.
    """
    queries = F.normalize(_wide(queries), dim=1)
    candidates = F.normalize(_wide(torch.cat([*documents])), dim=1)
    M, rounding = len(candidates), _rounding(queries, candidates)

    higher, equal = [], []
    for begin in range(0, len(queries), ROWS):
        rows = torch.arange(begin, min(begin + ROWS, len(queries)), device=queries.device)
        cosines = queries[rows] @ candidates.T
        positive = cosines[rows - begin, rows]

        # A cosine that is NaN is neither lower nor equal, so a positive without a number comes last.
        lower = (cosines < (positive - rounding[rows])[:, None]).sum(1)
        not_higher = (cosines <= (positive + rounding[rows])[:, None]).sum(1)
        equal.append((not_higher - lower).clamp(min=1))
        higher.append((M - not_higher).clamp(max=M - 1))
    b, t = torch.cat(higher), torch.cat(equal)

    harmonic = F.pad(torch.arange(1, M + 1, device=b.device).double().reciprocal().cumsum(0), (1, 0))
    return {
        "accuracy": ((b == 0) / t.double()).mean().item(),
        "mrr": ((harmonic[b + t] - harmonic[b]) / t).mean().item(),
        "chance": 1 / M,
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

    parts = []
    for begin in range(0, N, ROWS):
        rows = torch.arange(begin, min(begin + ROWS, N), device=x.device)
        squares = (norms[rows, None] + norms - 2 * x[rows] @ x.T).clamp(min=0)
        exponents = -t * squares
        exponents[rows - begin, rows] = -torch.inf
        parts.append(exponents.logsumexp(dim=1))
    # A sum of exponentials would be 0 where t is large, and its logarithm minus infinity.
    return torch.cat(parts).logsumexp(dim=0).item() - math.log(N * (N - 1)) if N > 1 else 0.0


def _wide(x: Tensor) -> Tensor:
    """Embeddings in at least 32 bits: scores of 16 bits would be equal where the embeddings are not."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _rounding(queries: Tensor, candidates: Tensor) -> Tensor:
    """By how much scores (N, M) of equal candidates may differ, (N,): a product rounds by their places."""
    largest = candidates.norm(dim=1).max() if len(candidates) else 0.0
    norms: Tensor = queries.norm(dim=1)
    return ROUNDING * torch.finfo(queries.dtype).eps * largest * norms


def _of_column(cells: Tensor, columns: Tensor) -> Tensor:
    """The cell of each row (n, M) in its column (n,); False where there is no such column."""
    inside = (columns >= 0) & (columns < cells.shape[1])
    return cells.gather(1, columns.clamp(0, cells.shape[1] - 1)[:, None])[:, 0] & inside
