"""Two views of each sentence: the scores of pairs, and the logsumexps of all that is no pair.

A row's negatives are the views of all other sentences, its own view's and the other's: those between the
views come from `paired_sums` for both views at once, and those within a view from `own_sums`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastqt.loss import Arguments
from fastqt.losses.common import scores
from fastqt.losses.pair_filters import PairFilters
from fastqt.losses.paired_sums import (
    PairScoring,
    others_than_own,
    own_sums,
    paired_sums,
    scoring_of,
    shares_scores,
)
from fastqt.problem import unit_rows
from fastqt.torch_modes import input_dtype


class TwoViews(NamedTuple):
    """The views at norm 1.

    Attributes:
        local: both of this process's sentences, (n, D) each.
        every: both of all ranks' sentences, this rank's first, (N, D) each; of one process `local`.
        scoring: how scores are computed.
        filters: what leaves them, if anything.
    """

    local: tuple[Tensor, Tensor]
    every: tuple[Tensor, Tensor]
    scoring: PairScoring
    filters: PairFilters | None

    @property
    def negatives(self) -> int:
        """How many negatives a row has."""
        return 2 * self.scoring.batch.total() - 2


class ViewSums(NamedTuple):
    """Of each sentence, (n,): the score of its views, and the logsumexps of both views' negatives."""

    positive: Tensor
    of_first: Tensor
    of_second: Tensor


def two_views(call: Arguments, z1: Tensor, z2: Tensor) -> TwoViews:
    """The views of a loss whose checked arguments are given.

    ValueError for less than two sentences.
    """
    batch, scoring = call.batch, scoring_of(call)
    if batch.total() < 2:
        raise ValueError(f"z2: want two views of at least 2 sentences, got {batch.total()}")

    exclude = call.values["exclude"]
    filters = None if exclude is None else PairFilters(exclude, batch)
    first, second = unit_rows(z1), unit_rows(z2)
    with batch.agreeing():
        has_walks = filters is None and shares_scores(first, batch.total(), scoring)
    # With the two walks nothing flows back to the first views of other ranks.
    firsts = first if batch.is_of_process or not has_walks else first.detach()
    firsts, seconds = (batch.gather_own_first(x, dtype=input_dtype(z1)) for x in (firsts, second))
    return TwoViews((first, second), (firsts, seconds), scoring, filters)


def view_sums(views: TwoViews, scale: float | Tensor) -> ViewSums:
    """The sums of scores with this scale."""
    (first, second), (firsts, seconds) = views.local, views.every
    scoring, filters = views.scoring._replace(scale=scale), views.filters
    if filters is None:
        positive, of_rows, of_columns = paired_sums(first, seconds, second, firsts, scoring)
        within = own_sums(first, firsts, scoring), own_sums(second, seconds, scoring)
    else:
        positive = scores(first, second, scale)
        of_rows = others_than_own(first, seconds, scoring, filters.between("query", "document"))
        of_columns = others_than_own(second, firsts, scoring, filters.between("document", "query"))
        within = (
            own_sums(first, firsts, scoring, filters.between("query", "query")),
            own_sums(second, seconds, scoring, filters.between("document", "document")),
        )
    return ViewSums(positive, torch.logaddexp(of_rows, within[0]), torch.logaddexp(of_columns, within[1]))
