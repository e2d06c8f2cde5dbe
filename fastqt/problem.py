"""The one language between losses and engines: a checked problem, what is wanted of it, what comes back.

A loss lowers its arguments to one of three kinds of problem. `Problem` is a softmax or a sigmoid over
queries against candidates, `ClipProblem` is CLIP's softmax over rows and over columns, and
`ThreeBlockProblem` is MixCSE's softmax over three blocks of scores. Every engine takes them through the
same functions; `fastqt.engines` describes those.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import NamedTuple

from fastqt.checks import check_option, is_batched, require, shown
from fastqt.fields import Differentiable
from fastqt.norms import LEAST_NORM
from fastqt.options import DiagonalMode, MemoryMode, Reduction, Similarity, TargetReduction
from fastqt.targets import TargetRows
from fastqt.torch_modes import is_traced, is_transformed

# In the order of csrc/cpu/score_tile.h.
DIAGONALS: tuple[str, ...] = get_args(DiagonalMode)
LINKS = ("softmax", "sigmoid", "log_sum_exp")

REDUCTIONS: tuple[str, ...] = get_args(Reduction)
TARGET_REDUCTIONS: tuple[str, ...] = get_args(TargetReduction)
SIMILARITIES: tuple[str, ...] = get_args(Similarity)
MEMORY_MODES: tuple[str, ...] = get_args(MemoryMode)
LEAST_MEMORY = 16 * 2**20  # bytes that may be asked for in place of a mode


def check_memory(memory: object) -> None:
    """Raises ValueError or TypeError unless `memory` is a mode or a number of bytes."""
    if isinstance(memory, str) or memory is None:
        check_option("memory", memory, MEMORY_MODES)
    elif isinstance(memory, bool) or not isinstance(memory, int):
        modes = " or ".join(map(repr, MEMORY_MODES))
        raise TypeError(f"memory: want {modes}, or a number of bytes as an integer, got {shown(memory)}")
    elif memory < LEAST_MEMORY:
        raise ValueError(f"memory: want at least {LEAST_MEMORY} bytes, got {memory}")


def room_of(memory: str | int, fast: int, low: int) -> int:
    """The bytes that a loss may take, of which a mode stands for as many as the engine says."""
    if isinstance(memory, str):
        return fast if memory == "fast" else low
    return memory


T = TypeVar("T")


class Inputs(NamedTuple, Generic[T]):
    """Something of each input of a `Problem` or a `ClipProblem` that there are gradients of.

    The order of these fields is that of the gradients, here and in csrc/cpu/problem.h.
    """

    queries: T | None = None
    candidates: T | None = None
    negatives: T | None = None
    row_negatives: T | None = None
    scale: T | None = None
    bias: T | None = None
    row_scores: T | None = None


class ThreeBlockInputs(NamedTuple, Generic[T]):
    """Something of each input of a `ThreeBlockProblem` that there are gradients of."""

    queries: T | None = None
    candidates: T | None = None
    own_columns: T | None = None
    next_columns: T | None = None
    own_rows: T | None = None
    next_rows: T | None = None
    scale: T | None = None


# Which inputs want a gradient, and those gradients, None where none is wanted.
Needs = Inputs[bool]
Gradients = Inputs[Tensor]
ThreeBlockNeeds = ThreeBlockInputs[bool]
ThreeBlockGradients = ThreeBlockInputs[Tensor]


class Rows(NamedTuple):
    """What an engine finds of each row.

    Attributes:
        loss: (N,) float64, or float32 on a device that has no float64, as all that is found of rows.
        saved: what the engine's `backward` wants to be given again; of a `Problem` always the logsumexp
            and the target mass of each row, (N,) float64, which a sigmoid leaves undefined, and so does a
            problem of several prefixes.
    """

    loss: Tensor
    saved: tuple[Tensor, ...]


@dataclass  # Not frozen: making a frozen instance takes three times as long.
class Problem(Differentiable):
    """Queries against candidates: the arguments of `contrastive_loss` or `sigmoid_loss`, checked."""

    queries: Tensor  # (N, D); all embeddings have one floating-point dtype
    candidates: Tensor  # (M, D)
    negatives: Tensor | None  # (K, D)
    row_negatives: Tensor | None  # (N, D)
    scale: float | Tensor  # ()
    targets: TargetRows  # T (N, M)
    diagonal: str
    query_groups: Tensor | None  # (N,) int64
    candidate_groups: Tensor | None  # (M,) int64
    mask: Tensor | None  # (N, M) bool, True = excluded
    memory: str | int = "fast"
    # In place of row_negatives: row i's negative is the mix of candidates i and partners[i], at norm 1.
    partners: Tensor | None = None  # (N,) int64
    mix: float = 1.0
    bias: Tensor | None = None  # (M,), added to the candidates' scores
    # A "softmax" over each row, a "sigmoid" of each cell, or the "log_sum_exp" of each row. That is the loss
    # of a softmax for a target mass of 1 that is on no candidate, and it has no targets.
    link: str = "softmax"
    # The rows of all embeddings count at norm 1. An engine that does not take that is given normalised rows.
    normalize: bool = False
    # In place of row_negatives: the score of one further cell of each row, in the dtype of losses. It is
    # neither scaled nor biased, it is no target and never excluded, and -inf stands for no cell.
    row_scores: Tensor | None = None  # (N,), contiguous
    # The loss is the weighted sum of the losses of the first so many columns of all embeddings, each of which
    # count at norm 1 by themselves with `normalize`. Empty: of the embeddings as they are. Ascending.
    prefix_dims: tuple[int, ...] = ()
    prefix_weights: tuple[float, ...] = ()
    # A cell leaves where its product of embeddings is above that of its row, unless it is a target, a
    # replaced diagonal or a given score. Infinity and NaN let all cells stay. In the dtype of losses.
    thresholds: Tensor | None = None  # (N,), contiguous

    needs_type: ClassVar[type[Any]] = Inputs
    # Which fields have something for each query or for each candidate, beside the targets and the mask.
    by_query: ClassVar[tuple[str, ...]] = (
        "queries",
        "row_negatives",
        "query_groups",
        "partners",
        "row_scores",
        "thresholds",
    )
    by_candidate: ClassVar[tuple[str, ...]] = ("candidates", "candidate_groups", "bias")


# Cells that a row has alone: they count once, however the candidates are divided.
ROW_CELLS = tuple(name for name in Problem.by_query if name in Inputs._fields and name != "queries")
EMBEDDINGS = Inputs._fields[:4]  # those that are (rows, D)


def with_embeddings(p: Problem, change: Callable[[Tensor], Tensor]) -> Problem:
    """The problem with its embeddings changed."""
    embeddings = {name: getattr(p, name) for name in EMBEDDINGS}
    changed: dict[str, Any] = {name: change(x) for name, x in embeddings.items() if x is not None}
    return replace(p, **changed)


def prefix_of(p: Problem, dim: int) -> Problem:
    """The problem of the first `dim` columns of all embeddings."""
    prefix = with_embeddings(p, lambda x: x[:, :dim])
    return replace(prefix, prefix_dims=(), prefix_weights=())


@dataclass
class ClipProblem(Differentiable):
    """Pairs of rows of equal index: a softmax over each row of the scores and one over each column.

    With `pairs` the scores are a rectangle of a larger matrix, which several processes share. Row i and
    column i are then a pair for i < pairs, which is N or 0. A computation has `sums` and `gradients_from` for
    it, and no loss. Scores that the first keeps, those of the first rows, the second does not compute again.
    """

    queries: Tensor  # (N, D)
    candidates: Tensor  # (N, D), or with `pairs` (M, D), where M >= pairs
    scale: float | Tensor  # ()
    memory: str | int = "fast"
    normalize: bool = False  # as of `Problem`
    pairs: int | None = None
    keeps: bool = False  # whether `sums` may keep scores
    kept: Tensor | None = None  # (n, M) scores of the first n rows, where it has
    # Several multiples of the scores have sums each: `row_others` of `ClipSums` and the parts of a `ClipSide`
    # are then (K, N), or (K, M) of columns.
    multiples: tuple[float, ...] = (1.0,)
    # Cells that leave the softmaxes of their row and of their column, or with `column_mask` that of their
    # row alone; no pair is among them.
    mask: Tensor | None = None  # (N, M) bool
    column_mask: Tensor | None = None  # (N, M) bool: cells that leave the softmax of their column
    # A cell leaves the softmax of its row where its product of embeddings is above the row's threshold, and
    # that of its column where it is above the column's, which is that of the row of the same pair. Infinity
    # and NaN let all cells stay.
    thresholds: Tensor | None = None  # (N,), in the dtype of losses

    needs_type: ClassVar[type[Any]] = Inputs

    def inputs(self) -> Inputs[Tensor]:
        """What gradients can flow to; a problem of this kind has not all of these fields."""
        scale = self.scale if isinstance(self.scale, Tensor) else None
        return Inputs(self.queries, self.candidates, scale=scale)

    @property
    def leave_apart(self) -> bool:
        """Whether other cells leave the softmaxes of rows than those of columns."""
        return self.column_mask is not None or self.thresholds is not None

    @property
    def has_cells(self) -> bool:
        """Whether there is a score; a process may have no rows."""
        return self.queries.shape[0] > 0 and self.candidates.shape[0] > 0


class ClipSums(NamedTuple):
    """What is found of the scores of a `ClipProblem`, all in the dtype of accumulation.

    Attributes:
        positive: (pairs,) the score of each pair; NaN in place of infinity, as of `positive_scores`.
        row_others, column_others: (N,) and (M,) the logsumexp, in each row and in each column, of the cells
            that are no pairs; -inf where there are none.
    """

    positive: Tensor
    row_others: Tensor
    column_others: Tensor


class ClipSide(NamedTuple):
    """The whole softmax of each row, or of each column, of which a `ClipProblem` may hold a part.

    Attributes:
        logsumexp: (N,) or (M,) in the dtype of accumulation, of all cells, a pair's included.
        weights: (N,) or (M,) of that dtype; dL/dS of a cell has weight * exp(S - logsumexp) from this side.
    """

    logsumexp: Tensor
    weights: Tensor


@dataclass
class ThreeBlockProblem(Differentiable):
    """MixCSE's three blocks of scores, for rows whose partners are the next ones.

    With C the cosines of queries and candidates, row i's scores are, up to the scale, C_ij in the first
    block, own_columns_j C_ij + next_columns_j C_i,j+1 in the second, and own_rows_i C_ij +
    next_rows_i C_i+1,j in the third. Indices are modulo N.

    Attributes:
        queries, candidates: (N, D), rows of norm 1.
        own_columns, next_columns: (N,) shares of a candidate and of the next one in their mixture, both
            multiplied by their norms and divided by the mixture's norm.
        own_rows, next_rows: (N,) the same of the queries.
        scale: 1 / temperature.
        third_block: whether the third block is there.
        masks_excluded: whether masked cells leave the softmax; otherwise their score is 0.
        own_mixture_weight: added to the scores of a sentence with its own mixtures.
        stop_gradient: no gradient flows through the mixtures.
    """

    queries: Tensor
    candidates: Tensor
    own_columns: Tensor
    next_columns: Tensor
    own_rows: Tensor
    next_rows: Tensor
    scale: Tensor  # ()
    third_block: bool
    masks_excluded: bool
    own_mixture_weight: float
    stop_gradient: bool
    memory: str | int = "fast"

    needs_type: ClassVar[type[Any]] = ThreeBlockInputs


AnyProblem: TypeAlias = Problem | ClipProblem | ThreeBlockProblem


def loss_dtype(queries: Tensor) -> torch.dtype:
    """The dtype of a loss: float64 for float64 inputs, float32 otherwise."""
    return torch.promote_types(queries.dtype, torch.float32)


def reduce(rows: Tensor, reduction: str) -> Tensor:
    """Losses of rows (N,) as `reduction` has it: their "mean", their "sum", or with "none" themselves."""
    if reduction == "none":
        return rows
    if reduction == "mean":
        return rows.mean()
    if reduction == "sum":
        return rows.sum()
    raise ValueError(f"reduction: want {', '.join(map(repr, REDUCTIONS))}, got {reduction!r}")


def unit_rows(x: Tensor) -> Tensor:
    """Rows (..., D) at norm 1, computed in float32 at least and rounded to the dtype of `x`."""
    rows = x.to(loss_dtype(x))
    if is_traced(rows) or is_transformed() or not rows.requires_grad:
        return F.normalize(rows, dim=-1).to(x.dtype)
    return _unit_rows(rows).to(x.dtype)


class _UnitRows(torch.autograd.Function):
    """`F.normalize` of rows, whose gradient has the same bits, from two thirds of the passes over them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        norms: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        unit = x / norms.clamp(min=LEAST_NORM)
        ctx.save_for_backward(x, norms, unit)
        return unit

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor]:
        x, norms, unit = ctx.saved_tensors
        gradient: Tensor = upstream[0]
        is_differentiated = torch.is_grad_enabled()
        if is_differentiated or is_batched(gradient):
            with torch.enable_grad():
                of_torch = F.normalize(x, dim=-1)
            found: Tensor = torch.autograd.grad(of_torch, x, gradient, create_graph=is_differentiated)[0]
            return (found,)
        divisors: Tensor = norms.clamp(min=LEAST_NORM)
        along: Tensor = (unit / divisors).mul_(gradient).sum(-1, keepdim=True)
        along.masked_fill_(norms < LEAST_NORM, 0)  # Shorter rows are divided by a constant.
        return ((gradient / divisors).sub_(unit * along),)


# torch gives `apply` no types.
_unit_rows: Callable[[Tensor], Tensor] = _UnitRows.apply


def positive_scores(scores: Tensor) -> Tensor:
    """The scores of positives, of which the logsumexps of other cells are taken off, with NaN for infinity.

    In log(exp(positive) + exp(others)) - positive two infinities would cancel each other.
    """
    return scores.masked_fill(scores.isposinf(), torch.nan)


def check_finite_scale(scale: float | Tensor) -> None:
    """Raises ValueError unless a scale is finite, as a number is; a compiled graph asserts it."""
    if isinstance(scale, Tensor):
        if is_traced(scale):
            require(scale.isfinite(), "scale: want a finite number, which is 1 / temperature")
        else:
            finite_scale(scale)


def finite_scale(scale: float | Tensor) -> float:
    """The value of a scale, which a tensor does not show before it is used."""
    value = scale.item() if isinstance(scale, Tensor) else scale
    if not math.isfinite(value):
        raise ValueError(f"scale: want a finite number, which is 1 / temperature, got {value}")
    return value


def check_scale_of_thresholds(p: Problem | ClipProblem) -> None:
    """Raises ValueError unless scores have the order of the similarities that thresholds are compared with.

    A device that is not read asserts it.
    """
    if p.thresholds is None:
        return
    wanted = "scale: want a positive number where false negatives are filtered"
    if isinstance(p.scale, Tensor):
        require(p.scale > 0, wanted)
    elif p.scale <= 0:
        raise ValueError(f"{wanted}, got {p.scale}")


# What can be wrong with a target, by the status numbers of csrc/cpu/score_tile.h.
TARGET_ON_DIAGONAL, TARGET_OUTSIDE, TARGET_NOT_POSITIVE, TARGET_MASKED, TARGET_NOT_FINITE = 1, 2, 3, 4, 5


def target_error(status: int, row: int, column: int, problem: Problem) -> ValueError:
    """The error for a target for which no loss is defined."""
    M, diagonal = problem.candidates.shape[0], problem.diagonal
    reason = {
        TARGET_ON_DIAGONAL: f"is on the diagonal that diagonal={diagonal!r} replaces; use diagonal='keep'",
        TARGET_OUTSIDE: f"is outside the M={M} candidates; want 0..{M - 1}, or -100 for no target",
        TARGET_NOT_POSITIVE: "has a weight that is negative or NaN; want weights >= 0",
        TARGET_MASKED: "is a cell that exclude takes out",
        TARGET_NOT_FINITE: "has an infinite weight, or makes the sum of the row's weights infinite",
    }[status]
    return ValueError(f"targets: row {row}'s target column {column} {reason}")
