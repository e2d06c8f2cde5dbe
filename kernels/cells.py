"""Exact cells, which the product of the scores excludes, and what the kernels find out about each row.

Exact cells are targets, the negative of a row, and a diagonal whose score is 0: a few in each row. Their
scores are float32 inner products, their probabilities and coefficients are computed in float64, and the
gradient kernels gather them one by one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

# Row shifts and maxima are logarithms to base 2, as the scores kernel takes them. All others are natural.
LOG2_E, LN_2 = tl.constexpr(math.log2(math.e)), tl.constexpr(math.log(2))
NOWHERE = tl.constexpr(2**31 - 1)  # a column beyond all others
NO_ROW_NEGATIVE, GIVEN_ROW_NEGATIVE, MIXED_ROW_NEGATIVE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
ROW_SCORE = tl.constexpr(3)  # of a row negative that has no embedding


@triton.jit
def row_negative_part(
    matrix, partners, mix, i, d, inside, row_stride, stride, KIND: tl.constexpr, inverse_norms=None
):
    """Elements d of row i's negative, float32. A mix, of rows times inverse norms, is not normalised here."""
    negative = tl.load(matrix + i * row_stride + d * stride, mask=inside, other=0.0).to(tl.float32)
    if KIND == MIXED_ROW_NEGATIVE:
        partner = tl.load(partners + i)
        other = tl.load(matrix + partner * row_stride + d * stride, mask=inside, other=0.0).to(tl.float32)
        if inverse_norms is not None:
            negative *= tl.load(inverse_norms + i)
            other *= tl.load(inverse_norms + partner)
        return mix * negative + (1 - mix) * other
    return negative


@dataclass(frozen=True)
class RowNegatives:
    """Negatives of rows: matrix[i], or mix * matrix[i] + (1 - mix) * matrix[partners[i]] at norm 1.

    Without a matrix their scores are given, and the coefficients are the gradient of these.
    """

    matrix: Tensor | None  # (N, D)
    scores: Tensor  # (N,) float32, written by the row kernels as the two following
    norms: Tensor | None  # where there is a matrix
    coefficients: Tensor
    partners: Tensor | None = None  # (N,) int64
    mix: float = 1.0


@dataclass(frozen=True)
class ByColumn:
    """Where each column's targets are in the order of rows: by the offsets of a band, or in lists."""

    starts: Tensor | None = None  # (M + 1,) int64: where each column's begin in the next
    places: Tensor | None = None  # int64, in the order of columns
    rows: Tensor | None = None  # (targets,) int64, of the places
    offsets: Tensor | None = None  # (K,) int64: place i K + k is in row i and column i + offsets[k]

    @property
    def operands(self) -> dict[str, Tensor | None]:
        """By their names in the kernels."""
        lists = {"column_starts": self.starts, "column_targets": self.places, "target_rows": self.rows}
        return {**lists, "offsets": self.offsets}

    @property
    def count(self) -> int:
        """How many offsets there are."""
        return 0 if self.offsets is None else len(self.offsets)


@dataclass(frozen=True)
class ExactCells:
    """The cells that are computed one by one: targets in the order of their rows, and the row negatives."""

    starts: Tensor  # (N + 1,) int64
    weights: Tensor  # (targets,) float64
    columns: Tensor  # (targets,) int64, -1 where there is none; the row kernels write this and the following
    rows: Tensor  # (targets,) int64
    scores: Tensor  # (targets,) float32
    coefficients: Tensor  # (targets,) float32: dL/dS
    lowest: Tensor  # (N,) int32: the lowest column among a row's targets, NOWHERE without any
    highest: Tensor  # (N,) int32: the highest, or -1
    sound: Tensor  # (N,) bool: whether the row's targets are such that it has a loss
    zeroed: Tensor | None  # (N,) bool: whether the row's cell on the diagonal counts with score 0
    row_negatives: RowNegatives | None

    @property
    def of_rows(self) -> tuple[Tensor | None, ...]:
        """What is known of each row's exact cells, as the kernels of the row statistics take it."""
        _, _, row_negative_scores, _, _ = self.row_negative_tensors
        return self.starts, self.columns, self.weights, self.scores, self.zeroed, row_negative_scores

    @property
    def all_coefficients(self) -> tuple[Tensor | None, ...]:
        """Where those kernels write dL/dS of the targets and of the row negatives."""
        return self.coefficients, self.row_negative_tensors[-1]

    @property
    def row_negative_tensors(self) -> tuple[Tensor | None, ...]:
        """The row negatives' matrix, partners, scores, norms and coefficients."""
        p = self.row_negatives
        return (None,) * 5 if p is None else (p.matrix, p.partners, p.scores, p.norms, p.coefficients)

    @property
    def row_negative_strides(self) -> tuple[int, ...]:
        matrix = self.row_negative_tensors[0]
        return (0, 0) if matrix is None else matrix.stride()

    @property
    def row_negative_kind(self) -> tl.constexpr:
        if self.row_negatives is None:
            return NO_ROW_NEGATIVE
        if self.row_negatives.matrix is None:
            return ROW_SCORE
        return GIVEN_ROW_NEGATIVE if self.row_negatives.partners is None else MIXED_ROW_NEGATIVE

    @property
    def mix(self) -> float:
        return 1.0 if self.row_negatives is None else self.row_negatives.mix


@dataclass(frozen=True)
class RowState:
    """What the row kernels find out about each row, all (N,)."""

    weights: Tensor  # float64: what its loss is multiplied by
    exact_max_log2: Tensor  # float32: the largest score among its exact cells, to base 2
    row_shift_log2: Tensor  # float32, to base 2
    shift_overflowed: Tensor  # int32: whether sums over- or underflow with the shift
    repairs_done: Tensor  # int32: how many programs have done their part of a row block's repair
    # float64, as the following: dL/dS = factor * E. Where E is stored times inverse norms, factor * E times
    # the inverse norm of the query is dL/dS times both inverse norms.
    factors: Tensor
    logsumexp: Tensor
    mass: Tensor
    loss: Tensor
    of_log_sum_exp: bool = False  # rows have mass 1 and no targets, so that their loss is their logsumexp
    of_cosines: bool = False  # E is stored times inverse norms

    @property
    def statistics(self) -> tuple[Tensor, ...]:
        """Where the kernels of the row statistics write what they find, but for the exact cells."""
        return self.logsumexp, self.mass, self.loss, self.factors
