"""What leaves the scores of rows with rows, where the rows are the two sides of pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

from torch import Tensor

from fastqt.arguments import exclusions_of
from fastqt.distributed.batch import Batch
from fastqt.exclusions import Above, ExcludeLike, Exclusions, Filter, Margin, OfIds

# What a loss of pairs takes that scores each side with each.
PairExclude: TypeAlias = Annotated[ExcludeLike | None, exclusions_of(Margin, OfIds)]
PairIds: TypeAlias = Annotated[ExcludeLike | None, exclusions_of(OfIds)]
Side: TypeAlias = Literal["query", "document"]


class PairFilters:
    """The filters of a loss, of one process or of ranks, for the scores of any side with any.

    Args:
        exclude: what the loss is given; ids of `Same` and `Within` are those of queries and of documents.
        batch: the pairs of all ranks.
        above: thresholds of this process's rows, in whatever direction.
    """

    def __init__(self, exclude: Exclusions | None, batch: Batch, above: Sequence[Above] = ()) -> None:
        self.above = above
        self.of_ids = [x for x in exclude.filters if isinstance(x, OfIds)] if exclude is not None else []
        self.every: list[dict[Side, Tensor]] = []
        for x in self.of_ids:
            queries = batch.gather_constant_own_first(x.query_ids)
            documents = (
                queries if x.candidate_ids is None else batch.gather_constant_own_first(x.candidate_ids)
            )
            self.every.append({"query": queries, "document": documents})

    def between(self, rows: Side, columns: Side) -> Exclusions | None:
        """What leaves the scores of rows of a side with columns, of all ranks and this rank's first."""
        filters: list[Any] = [*self.above]
        for x, every in zip(self.of_ids, self.every, strict=True):
            ids = {"query": x.query_ids, "document": x.columns}
            filters.append(type(x)(ids[rows], every[columns]))
        return Exclusions(tuple(filters)) if filters else None

    def of_hard_negatives(self, rows: Side) -> Exclusions | None:
        """What leaves the scores of rows with the hard negatives of the queries, as in `between`.

        A hard negative is in the part of its query, but it has no id that `Same` knows.
        """
        filters: list[Any] = [*self.above]
        for x, every in zip(self.of_ids, self.every, strict=True):
            if x.hard_negatives_are_the_querys:
                ids = {"query": x.query_ids, "document": x.columns}
                filters.append(type(x)(ids[rows], every["query"]))
        return Exclusions(tuple(filters)) if filters else None


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
