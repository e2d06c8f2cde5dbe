"""The scores of the two sides of pairs, each side with each, without those of the pairs themselves.

A pair is a query and a document, or two views of one text, and a query may have hard negatives. What
`exclude` says of queries and documents leaves the scores of any side with any. A hard negative is in the part
of its query, but it has no id that `Same` knows.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Annotated, Literal, TypeAlias

import torch
from torch import Tensor

from fastqt.arguments import exclusions_of
from fastqt.engines import Engine
from fastqt.exclusions import Above, ExcludeLike, Exclusions, Filter, Margin, OfIds, Padding
from fastqt.functional.call import Call
from fastqt.functional.false_negatives import threshold_of
from fastqt.functional.row_cells import joined, scores_of_row_negatives
from fastqt.loss import Arguments
from fastqt.losses.common import scores
from fastqt.losses.debiasing import LEAST_SCALE, debiased
from fastqt.losses.leaving import mask_of_ids, takes_masks
from fastqt.losses.paired_sums import PairScoring, own_sums, paired_sums, shares_scores, sums_of
from fastqt.options import Memory
from fastqt.problem import loss_dtype, unit_rows
from fastqt.targets import NoTargets
from fastqt.torch_modes import input_dtype

# What a loss of pairs takes that scores each side with each.
PairExclude: TypeAlias = Annotated[ExcludeLike | None, exclusions_of(Margin, OfIds)]
PairIds: TypeAlias = Annotated[ExcludeLike | None, exclusions_of(OfIds)]
Side: TypeAlias = Literal["query", "document"]


class PairScores:
    """The scores of a loss's pairs, and what leaves them; of one process or of ranks.

    Args:
        call: the loss.
        queries, documents: (n, D), this process's.
        hard: sets of hard negatives of its queries, (n, D) each.
        alone: (n, D) or (n, K, D) negatives of each of its queries alone.
    """

    def __init__(
        self,
        call: Arguments,
        queries: Tensor,
        documents: Tensor,
        hard: Sequence[Tensor] = (),
        alone: Tensor | None = None,
    ) -> None:
        exclude: Exclusions | None = call.values["exclude"]
        margin = None if exclude is None else exclude.of(Margin)
        self.batch, self.scoring = call.batch, PairScoring(call.values["scale"], call)
        self.local: dict[Side, Tensor] = {"query": queries, "document": documents}
        self.hard, self.alone = hard, alone
        padding = None if exclude is None else exclude.of(Padding)
        self.is_padding = None if padding is None else padding.is_padding
        self.is_filtered = exclude is not None and exclude.without(Padding) is not None
        self.spares_hard = margin is not None and margin.spare_own_negatives
        self.above = [] if margin is None else [thresholds_of(queries, documents, margin)]
        of_ids = () if exclude is None else exclude.filters
        self.ids = [self._of_sides(x) for x in of_ids if isinstance(x, OfIds)]
        # Found once. A cached_property has a lock in Python 3.11, which no graph of torch.compile holds.
        self._every: dict[tuple[Side, bool], Tensor] = {}
        self._engine_of_walks: list[Engine | None] = []  # once it is known
        self._every_hard: list[Tensor] | None = None

    def _of_sides(self, x: OfIds) -> tuple[type[OfIds], dict[Side, Tensor], dict[Side, Tensor]]:
        """The kind of a filter, and the ids of this process's and of all ranks' sides, this rank's first."""
        queries = documents = self.batch.gather_constant_own_first(x.query_ids)
        if x.candidate_ids is not None:
            documents = self.batch.gather_constant_own_first(x.candidate_ids)
        local: dict[Side, Tensor] = {"query": x.query_ids, "document": x.columns}
        return type(x), local, {"query": queries, "document": documents}

    @property
    def engine_of_walks(self) -> Engine | None:
        """The engine that sums up both directions of pairs in one walk, if one does."""
        if not self._engine_of_walks:
            rows = self.local["query"]
            with self.batch.agreeing():
                total = self.batch.total()
                engine = shares_scores(rows, total, self.scoring)
                # What every rank knows alike.
                masked = engine is not None and engine.masks_pairs and takes_masks(total, self._memory)
                if self.is_filtered and (self.above or not masked):
                    engine = None
            self._engine_of_walks.append(engine)
        return self._engine_of_walks[0]

    @property
    def _memory(self) -> Memory:
        memory: Memory = self.scoring.call.values["memory"]
        return memory

    def _masked(self, rows: Side, columns: Side) -> PairScoring:
        """The scoring with a mask of the cells that leave, none of which is a pair."""
        leaving = self._leave(rows, columns)
        if leaving is None:
            return self.scoring
        mask = mask_of_ids(leaving.ids(self.local[rows].device))
        mask.diagonal().fill_(False)
        return self.scoring._replace(leaving=mask)

    def every(self, side: Side, *, constant: bool = False) -> Tensor:
        """A side of all ranks, (N, D), this rank's first; if constant, no gradient may be wanted of it."""
        for known in ((side, False), (side, constant)):
            if known in self._every:
                return self._every[known]
        rows = self.local[side].detach() if constant else self.local[side]
        gathered = self.batch.gather_own_first(rows, dtype=input_dtype(rows))
        self._every[side, constant] = gathered
        return gathered

    @property
    def every_hard(self) -> list[Tensor]:
        """The sets of hard negatives of all ranks, (N, D) each, this rank's first."""
        if self._every_hard is None:
            gathered = [self.batch.gather_own_first(x, dtype=input_dtype(x)) for x in self.hard]
            self._every_hard = gathered
        return self._every_hard

    def at(self, scale: float | Tensor) -> PairScores:
        """The same with another scale."""
        other = copy.copy(self)
        other.scoring = self.scoring._replace(scale=scale)
        return other

    def of_nothing(self) -> PairScores:
        """The same cells with scores of 0, whose logsumexp is the logarithm of their number."""
        if self.above:  # which compares the scores as they are
            return self.at(LEAST_SCALE)
        other, total = self.at(1.0), self.batch.total()
        other.local = {side: x.new_zeros(len(x), 1) for side, x in self.local.items()}
        other._every = {(side, False): x.new_zeros(total, 1) for side, x in self.local.items()}
        other.hard = [x.new_zeros(len(x), 1) for x in self.hard]
        other._every_hard = [x.new_zeros(total, 1) for x in self.hard]
        if self.alone is not None:
            other.alone = self.alone.new_zeros(*self.alone.shape[:-1], 1)
        return other

    def true_negatives(
        self, positive: Tensor, others: Sequence[Tensor], log_counts: Sequence[Tensor]
    ) -> Tensor:
        """What is expected of the other cells of each row if some are its positives, see `debiased`."""
        values = self.scoring.call.values
        return debiased(positive, others, log_counts, values["tau_plus"], self.scoring.scale)

    @property
    def positive(self) -> Tensor:
        """The score of each pair, (n,)."""
        return scores(self.local["query"], self.local["document"], self.scoring.scale)

    def others(self, rows: Side, columns: Side, negatives: Tensor | None = None) -> Tensor:
        """The logsumexp of each row of a side with a side's rows but its own, and with negatives, (n,)."""
        every = self.every(columns)
        if rows == columns:  # As another tensor: torch.compile refuses one that is two inputs.
            every = every.view_as(every)
        leave = self._leave(rows, columns)
        return sums_of(self.local[rows], every, self.scoring, leave, negatives, diagonal="exclude")

    def both_directions(self) -> tuple[Tensor, Tensor, Tensor]:
        """The score of each pair, and the logsumexps of its query with other documents and the reverse."""
        if self.engine_of_walks is not None:
            scoring = self._masked("query", "document")
            return paired_sums(self.local["query"], self.every("document"), scoring)
        return self.positive, self.others("query", "document"), self.others("document", "query")

    def own(self, side: Side) -> Tensor:
        """The logsumexp of each row of a side with all others of its side, (n,)."""
        if self.engine_of_walks is not None:
            every = self.every(side, constant=True)
            return own_sums(self.local[side], every, self._masked(side, side))
        return self.others(side, side)

    def of_views(self) -> tuple[Tensor, Tensor, Tensor]:
        """The score of each pair, and the logsumexps of either side with all others of both sides, (n,)."""
        positive, of_queries, of_documents = self.both_directions()
        sums = torch.logaddexp(of_queries, self.own("query"))
        return positive, sums, torch.logaddexp(of_documents, self.own("document"))

    def of_views_times(self, multiples: tuple[float, ...]) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """The score of each pair, and what `of_views` has beside it of each multiple of the scores."""
        engine = self.engine_of_walks
        if len(multiples) > 1 and engine is not None and engine.sums_multiples:
            several = copy.copy(self)
            several.scoring = self.scoring._replace(multiples=multiples)
            positive, first, second = several.of_views()
            return positive, [*zip(first, second, strict=True)]
        of_each = [self.at(multiple * self.scoring.scale).of_views() for multiple in multiples]
        return of_each[0][0] / multiples[0], [(first, second) for _, first, second in of_each]

    def with_hard(self, rows: Side) -> list[Tensor]:
        """The logsumexps of each row with the hard negatives of other queries, (n,) for each set."""
        leave = self._leave_hard(rows)
        local = self.local[rows]
        return [sums_of(local, x, self.scoring, leave, diagonal="exclude") for x in self.every_hard]

    def with_own_hard(self) -> list[Tensor]:
        """The score of each query with its own hard negative of each set, (n,); -inf where that leaves."""
        queries, found = self.local["query"], []
        for x in self.hard:
            cells = scores(queries, x, self.scoring.scale)
            for each in () if self.spares_hard else self.above:
                similar = scores(queries.detach(), x.detach(), 1.0)
                cells = cells.masked_fill(similar > each.thresholds, -torch.inf)
            found.append(cells)
        return found

    def with_alone(self) -> list[Tensor]:
        """The logsumexp of each query with the negatives that it has alone, (n,)."""
        if self.alone is None:
            return []
        thresholds = None if not self.above else self.above[0].thresholds
        cells = Call(
            "log_sum_exp",
            NoTargets(),
            self.local["query"],
            self.local["document"],
            scale=self.scoring.scale,
            row_negatives=self.alone,
            thresholds=thresholds,
            spares_row_negatives=self.spares_hard,
            is_padding=self.is_padding,
        )
        return [joined(scores_of_row_negatives(cells))]

    def with_all_documents(self, *, positives: bool) -> list[Tensor]:
        """The logsumexp of each query with all hard negatives, and with the positives of other queries."""
        hard = torch.cat(self.every_hard) if self.hard else None
        if positives:
            return [self.others("query", "document", hard)]
        return (
            []
            if hard is None
            else [sums_of(self.local["query"], hard, self.scoring, self._leave_hard("query"))]
        )

    def _leave(self, rows: Side, columns: Side) -> Exclusions | None:
        """What leaves the scores of a side with all ranks' rows of a side."""
        of_ids = [kind(local[rows], every[columns]) for kind, local, every in self.ids]
        return _joined([*self.above, *of_ids])

    def _leave_hard(self, rows: Side) -> Exclusions | None:
        """What leaves the scores of a side with hard negatives."""
        of_ids = [
            kind(local[rows], every["query"])
            for kind, local, every in self.ids
            if kind.hard_negatives_are_the_querys
        ]
        return _joined([*self.above, *of_ids])


def _joined(filters: Sequence[Filter]) -> Exclusions | None:
    return Exclusions(tuple(filters)) if filters else None


def thresholds_of(queries: Tensor, positives: Tensor, margin: Margin) -> Above:
    """What similarities of each row are compared with, for a margin above that of its positive."""
    a, b = (x.detach().to(loss_dtype(x)) for x in (queries, positives))
    norms = torch.linalg.vector_norm(a, dim=1) * torch.linalg.vector_norm(b, dim=1)
    similar, width = scores(a, b, 1.0), queries.shape[1]
    thresholds = threshold_of(similar, norms, width, margin.margin, margin.strategy)
    return Above(thresholds, margin.spare_own_negatives)


def two_views(call: Arguments, z1: Tensor, z2: Tensor) -> PairScores:
    """The scores of two views of at least two sentences, by cosine."""
    if call.batch.total() < 2:
        raise ValueError(f"z2: want two views of at least 2 sentences, got {call.batch.total()}")
    return PairScores(call, unit_rows(z1), unit_rows(z2))


def with_hard_negatives(
    exclude: Exclusions | None, n: int, negatives: Tensor | None, *, repeated: Literal["each", "all"]
) -> Exclusions | None:
    """The filters with the parts of hard negatives, which are those of their queries.

    Args:
        exclude: those of pairs.
        n: the number of queries.
        negatives: (K n, D), if there are any.
        repeated: whether the hard negatives of "each" query are one after the other, or the first of "all".
    """
    if exclude is None or negatives is None:
        return exclude
    count = len(negatives) // max(n, 1)

    def with_parts(x: Filter) -> Filter:
        if not (isinstance(x, OfIds) and x.hard_negatives_are_the_querys):
            return x
        ids = x.query_ids
        parts = ids.repeat_interleave(count) if repeated == "each" else ids.repeat(count)
        return type(x)(ids, x.columns, parts)

    return Exclusions(tuple(map(with_parts, exclude.filters)))
