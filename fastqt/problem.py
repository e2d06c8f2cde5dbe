"""One contrastive loss to compute: the arguments of `contrastive_loss`, checked and lowered."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fastqt.targets import Diagonal, TargetRows

# In the order of csrc/cpu/score_tile.h.
DIAGONALS = ("zero", "exclude", "keep")
LINKS = ("softmax", "sigmoid")


@dataclass  # and not frozen, which makes an instance at three times the cost
class Problem:
    queries: Tensor  # (N, D), as all embeddings of one floating-point dtype
    candidates: Tensor  # (M, D)
    negatives: Tensor | None  # (K, D)
    row_negatives: Tensor | None  # (N, D)
    scale: float | Tensor  # ()
    targets: TargetRows  # T (N, M)
    diagonal: str
    query_groups: Tensor | None  # (N,) int64
    candidate_groups: Tensor | None  # (M,) int64
    mask: Tensor | None  # (N, M) bool, True = excluded
    memory: str = "fast"
    # Instead of row_negatives: row i's is the mix of candidates i and partners[i], at norm 1.
    partners: Tensor | None = None  # (N,) int64
    mix: float = 1.0
    bias: Tensor | None = None  # (M,), added to the candidates' scores
    # What makes probabilities of scores: a softmax over a row, or a sigmoid of each cell.
    link: str = "softmax"


class Needs(NamedTuple):
    """Which inputs want a gradient."""

    queries: bool = False
    candidates: bool = False
    negatives: bool = False
    row_negatives: bool = False
    scale: bool = False
    bias: bool = False


@dataclass
class Rows:
    """What is known of each row, (N,) float64: log-sum-exp and target mass (of a softmax), and the loss."""

    logsumexp: Tensor
    mass: Tensor
    loss: Tensor


@dataclass
class Gradients:
    queries: Tensor | None = None
    candidates: Tensor | None = None
    negatives: Tensor | None = None
    row_negatives: Tensor | None = None
    scale: Tensor | None = None
    bias: Tensor | None = None


def pairs(a: Tensor, b: Tensor, scale: float | Tensor, memory: str) -> Problem:
    """Each row of a, (N, D), among all of b, with b's row of the same index for its target."""
    targets = Diagonal().rows(len(a), len(b), a.device)
    return Problem(a, b, None, None, scale, targets, "keep", None, None, None, memory)


def static_grad_scale(dtype: torch.dtype, reduction: str) -> float:
    """What gradients are multiplied by that are kept until their upstream one is known.

    Those of a mean are among float16's subnormals at a few thousand rows, from where no gradient scaler
    would bring their digits back.
    """
    return 2.0**6 if dtype is torch.float16 and reduction == "mean" else 1.0


def finite_scale(p: Problem) -> float:
    """The value of a problem's scale, which a tensor does not show before it is used."""
    scale = p.scale.item() if isinstance(p.scale, Tensor) else p.scale
    if not math.isfinite(scale):
        raise ValueError(f"scale: want a finite number, got {scale}")
    return scale


# What a target can have against it, by the status numbers of csrc/cpu/score_tile.h.
TARGET_ON_DIAGONAL, TARGET_OUTSIDE, TARGET_NOT_POSITIVE, TARGET_MASKED = 1, 2, 3, 4


def target_error(status: int, row: int, column: int, problem: Problem) -> ValueError:
    M, diagonal = problem.candidates.shape[0], problem.diagonal
    reason = {
        TARGET_ON_DIAGONAL: f"is on the diagonal that diagonal={diagonal!r} replaces; use diagonal='keep'",
        TARGET_OUTSIDE: f"is outside the M={M} candidates",
        TARGET_NOT_POSITIVE: "has a weight that is negative or NaN; want weights >= 0",
        TARGET_MASKED: "is a cell that mask excludes",
    }[status]
    return ValueError(f"targets: row {row}'s target column {column} {reason}")
