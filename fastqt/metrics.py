"""How well sentences find their neighbours and their other views."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

ROWS = 256


@torch.no_grad()
def context_accuracy(
    queries: Tensor,  # (N, D)
    candidates: Tensor,  # (N, D)
) -> tuple[float, float]:
    """Forward and backward accuracy of a batch of consecutive sentences.

    Forward: the share of rows i < N−1 whose highest score is that of candidate i+1; backward: of rows
    i > 0 and candidate i−1. The score of a sentence with itself is replaced by 0, as in the loss. Chance
    is about 1/N. Scores are taken 256 rows at a time: O(256·N) memory. (Logeswaran & Lee 2018, code.)

    Returns:
        Two shares in [0, 1]; 0 for a single row.
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
) -> dict[str, float]:
    """What the slides of MixCSE plot over a training: means of the cosines, alignment and uniformity.

    Returns:
        positive_cosine: of a sentence's two views; negative_cosine: of all other pairs; mixed_cosine: of
        the first view and the next sentence's second view mixed with `mix` of its own; alignment: the mean
        squared distance of two views; uniformity: see `uniformity`, of the first views.
    """
    z1, z2 = F.normalize(z1.double(), dim=1), F.normalize(z2.double(), dim=1)
    N = len(z1)
    positive = (z1 * z2).sum(1)
    mixed = F.normalize(mix * z2 + (1 - mix) * z2.roll(-1, 0), dim=1)
    pairs = max(N * (N - 1), 1)
    return {
        "positive_cosine": positive.mean().item(),
        "negative_cosine": ((z1.sum(0) @ z2.sum(0) - positive.sum()) / pairs).item(),
        "mixed_cosine": (z1 * mixed).sum(1).mean().item(),
        "alignment": (z1 - z2).square().sum(1).mean().item(),
        "uniformity": uniformity(z1),
    }


def uniformity(
    x: Tensor,  # (N, D)
    t: float = 2.0,
) -> float:
    """log E exp(−t‖xᵢ − xⱼ‖²) over all pairs of different rows (Wang & Isola 2020), 256 rows at a time.

    0 for a single row; of rows at norm 1 the lower, the more evenly they lie on the sphere.
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
