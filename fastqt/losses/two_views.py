"""Two views of each sentence: the scores of pairs, and the logsumexps of all that is no pair.

A row's negatives are the views of all other sentences, its own view's and the other's: those between the
views come from `paired_sums` for both views at once, and those within a view from `own_sums`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from fastqt.checks import check_option, check_scale
from fastqt.distributed.agreement import agree_on_rows
from fastqt.distributed.group import GroupLike
from fastqt.losses.paired_sums import Walk, own_sums, paired_sums, shares_scores
from fastqt.options import Backend, Memory, Reduction
from fastqt.problem import REDUCTIONS, check_memory, unit_rows
from fastqt.torch_modes import input_dtype


class TwoViews(NamedTuple):
    """The views at norm 1.

    Attributes:
        local: both of this process's sentences, (n, D) each.
        every: both of all ranks' sentences, this rank's first, (N, D) each; of one process `local`.
        walk: how scores are computed.
    """

    local: tuple[Tensor, Tensor]
    every: tuple[Tensor, Tensor]
    walk: Walk

    @property
    def negatives(self) -> int:
        """How many negatives a row has."""
        return 2 * self.walk.batch.total() - 2


class ViewSums(NamedTuple):
    """Of each sentence, (n,): the score of its views, and the logsumexps of both views' negatives."""

    positive: Tensor
    of_first: Tensor
    of_second: Tensor


def two_views(
    function: str,
    z1: Tensor,
    z2: Tensor,
    check: Callable[[], Mapping[str, Hashable]],
    scale: float | Tensor,
    reduction: Reduction,
    memory: Memory,
    backend: Backend | None,
    group: GroupLike | None,
) -> TwoViews:
    """The views of a loss; `check` checks the options of its own, and returns them."""

    def check_all(n: int) -> dict[str, Hashable]:
        check_scale(scale, z1.dtype)
        check_option("reduction", reduction, REDUCTIONS)
        check_memory(memory)
        return {"reduction": reduction, **check()}

    batch, (z1, z2) = agree_on_rows(group, function, check_all, {"scale": scale}, z1=z1, z2=z2)
    if batch.total() < 2:
        raise ValueError(f"z2: want two views of at least 2 sentences, got {batch.total()}")

    first, second = unit_rows(z1), unit_rows(z2)
    walk = Walk(scale, memory, backend, batch, function)
    with batch.agreeing():
        has_walks = shares_scores(first, batch.total(), walk)
    # With the two walks nothing flows back to the first views of other ranks.
    firsts = first if batch.is_of_process or not has_walks else first.detach()
    firsts, seconds = (batch.gather_own_first(x, dtype=input_dtype(z1)) for x in (firsts, second))
    return TwoViews((first, second), (firsts, seconds), walk)


def view_sums(views: TwoViews, scale: float | Tensor) -> ViewSums:
    """The sums of scores with this scale."""
    (first, second), (firsts, seconds) = views.local, views.every
    walk = views.walk._replace(scale=scale)
    positive, of_rows, of_columns = paired_sums(first, seconds, second, firsts, walk)
    of_first = torch.logaddexp(of_rows, own_sums(first, firsts, walk))
    of_second = torch.logaddexp(of_columns, own_sums(second, seconds, walk))
    return ViewSums(positive, of_first, of_second)
