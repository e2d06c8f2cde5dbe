"""Losses of rows of scores in plain PyTorch: the loss and its gradients, some rows at a time.

Such a loss is a link: what it is of the scores of some rows, and how it changes with each of them. All else
is here: the scores, the weights of rows, the gradients of the embeddings and of the scale, the ranks. On any
device it is differentiable once, and to torch.compile it is one operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fastqt import autograd
from fastqt.autograd.walked import WalkedOperator
from fastqt.devices import accumulation_dtype
from fastqt.engines.chunked.walk import scale_on
from fastqt.engines.own_products import multiply_read, product_read
from fastqt.fields import Differentiable
from fastqt.loss import Arguments
from fastqt.problem import loss_dtype, unit_rows
from fastqt.torch_modes import without_autocast

# float16 holds this many times a derivative of about 1, and what is smaller keeps its digits down to 4e-9.
FLOAT16_SPREAD = 2.0**15
LEAST = 1e-30  # that float32 can be divided by


class ScoreNeeds(NamedTuple):
    """Which inputs of a `ScoreProblem` want a gradient."""

    queries: bool = False
    candidates: bool = False
    scale: bool = False


# In the order of `ScoreNeeds`.
Gradients: TypeAlias = tuple[Tensor | None, Tensor | None, Tensor | None]


@dataclass
class ScoreProblem(Differentiable):
    """Queries against candidates. A loss adds what its link reads, in fields of types that operators take."""

    queries: Tensor  # (N, D)
    candidates: Tensor  # (M, D)
    scale: float | Tensor  # ()
    reads: str  # the dtype in which products read both: of 16 bits where that is as exact

    needs_type: ClassVar[type[ScoreNeeds]] = ScoreNeeds
    # How many scores there are at a time: on a CPU few, so that they stay near the caches, but of enough rows
    # that products seldom read all candidates.
    scores_at_once: ClassVar[int] = 2**21
    cpu_scores_at_once: ClassVar[int] = 2**20
    # Whether the derivatives of rows with small weights are small numbers, which 16 bits would round to 0.
    # Otherwise products read them without the weights, as numbers of about 1.
    weighs_scores: ClassVar[bool] = False


# It takes a problem, which rows, their scores (n, M), which it may overwrite, and whether derivatives are
# wanted. It gives the losses (n,) and then their derivatives by the scores, (n, M), which are overwritten.
Link: TypeAlias = "Callable[[Any, slice, Tensor, bool], tuple[Tensor, Tensor | None]]"


class Scoring:
    """The scores of a problem, and the gradients that follow from those of the scores.

    Args:
        p: the problem.
        row_weights: (N,), of the sum of losses whose gradients are wanted; None for losses alone.
        needs: which gradients are wanted.
    """

    def __init__(self, p: Any, row_weights: Tensor | None, needs: ScoreNeeds) -> None:
        self.p, self.row_weights, self.needs = p, row_weights, needs
        self.scale = scale_on(p.queries.device, p.scale)
        self.d_queries = torch.zeros_like(p.queries) if needs.queries else None
        self.d_candidates = torch.zeros_like(p.candidates) if needs.candidates else None
        self.d_scale: Tensor | None = None
        if needs.scale:
            self.d_scale = p.queries.new_zeros((), dtype=accumulation_dtype(p.queries.device))
        if row_weights is not None:
            # Weights count beside the largest of them.
            self.spread = FLOAT16_SPREAD if p.reads == "float16" else 1.0
            self.largest = row_weights.abs().amax().clamp(min=LEAST)

    @property
    def rows_at_once(self) -> int:
        p = self.p
        scores: int = p.cpu_scores_at_once if p.queries.is_cpu else p.scores_at_once
        return max(scores // len(p.candidates), 1)

    def scores(self, rows: slice) -> Tensor:
        """The scores of some rows with all candidates, (n, M)."""
        return scores_of(self.p.queries[rows], self.p.candidates, self.scale, self.p.reads)

    def add(self, rows: slice, d_scores: Tensor) -> None:
        """Adds the gradients of some rows, from the derivatives of their losses by their scores."""
        assert self.row_weights is not None
        p, queries, shares = self.p, self.p.queries[rows], None
        if p.weighs_scores:
            d_scores *= self.row_weights[rows, None].to(d_scores.dtype)
        else:
            d_scores *= self.spread
            shares = (self.row_weights[rows, None] / self.largest).to(d_scores.dtype)

        with without_autocast(queries):
            if self.d_candidates is not None:
                weighted = queries if shares is None else shares * queries
                multiply_read(self.d_candidates, d_scores.T, weighted, p.reads, add=True)
            if not self.needs.queries and not self.needs.scale:
                return
            of_rows = product_read(d_scores, p.candidates, p.reads)
        if shares is not None:
            of_rows *= shares
        if self.d_scale is not None:
            self.d_scale += (of_rows * queries).sum(dtype=self.d_scale.dtype)
        if self.d_queries is not None:
            self.d_queries[rows] = of_rows

    def gradients(self) -> Gradients:
        """The gradients, once all rows are added."""
        factor = self.scale
        if self.row_weights is not None and not self.p.weighs_scores:
            unit = self.largest / self.spread  # of what is summed
            factor = factor * unit
            self.d_scale = None if self.d_scale is None else self.d_scale * unit
        for gradient in (self.d_queries, self.d_candidates):
            if gradient is not None:
                gradient *= factor.to(gradient.dtype) if isinstance(factor, Tensor) else factor
        return self.d_queries, self.d_candidates, self.d_scale


class ScoreOperator(WalkedOperator):
    """A loss of rows of scores, and the operator of it; see `WalkedOperator`.

    Args:
        name: of the loss, for its operator.
        kind: the class of its problems.
        link: what it is of scores.
        scoring: how scores follow from a problem.
    """

    def __init__(
        self, name: str, kind: type[ScoreProblem], link: Link, scoring: type[Scoring] = Scoring
    ) -> None:
        self.link, self.scoring = link, scoring
        super().__init__(name, kind, self._losses_and_gradients)

    def _losses_and_gradients(
        self, p: Any, row_weights: Tensor | None, needs: ScoreNeeds
    ) -> tuple[Tensor, Gradients]:
        """The loss of each row, (N,), and with weights the gradients of sum_i row_weights_i loss_i."""
        losses = p.queries.new_zeros(len(p.queries), dtype=accumulation_dtype(p.queries.device))
        scoring = self.scoring(p, row_weights, needs)
        for rows in slices(len(losses), scoring.rows_at_once):
            losses[rows], d_scores = self.link(p, rows, scoring.scores(rows), row_weights is not None)
            if d_scores is not None and row_weights is not None:
                scoring.add(rows, d_scores)
        return losses, scoring.gradients()

    def loss(
        self,
        call: Arguments,
        queries: Tensor,
        candidates: Tensor,
        problem: Callable[[Tensor, Tensor], ScoreProblem],
        scale: float | Tensor = 1.0,
    ) -> Tensor:
        """The loss of all ranks' rows, as the options `reduction` and `normalize` of the call have it.

        Args:
            call: of the loss.
            queries: (n, D), this rank's.
            candidates: (M, D), those of all ranks.
            problem: the problem of both in the dtype of losses, of norm 1 if the call says so.
            scale: of the scores, to which a gradient may flow.
        """

        def losses(part: str) -> Tensor:
            sides = embeddings_of(call, queries, candidates)
            return autograd.loss_of(problem(*sides), part, self, call.function)

        return call.batch.loss(call.values["reduction"], (queries, candidates, scale), losses)


def embeddings_of(call: Arguments, *embeddings: Tensor) -> list[Tensor]:
    """Embeddings in the dtype of the loss of the first ones, and of norm 1 if the call says so."""
    dtype = loss_dtype(call.values["queries"])
    converted = [x.to(dtype) for x in embeddings]
    return [unit_rows(x) for x in converted] if call.values["normalize"] else converted


def scores_of(queries: Tensor, candidates: Tensor, scale: float | Tensor, dtype: str) -> Tensor:
    """The scaled products of some queries with all candidates, of factors that are read in a dtype.

    Products of 16 bits are scaled after they are added up, and others before, with a rounding less.
    """
    rounds = getattr(torch, dtype).itemsize == 2
    with without_autocast(queries):
        products = product_read(queries if rounds else scale * queries, candidates.T, dtype)
    return scale * products if rounds else products


def slices(length: int, size: int) -> Iterator[slice]:
    """The slices of a length that have a size, and the rest."""
    return (slice(begin, min(begin + size, length)) for begin in range(0, length, size))
