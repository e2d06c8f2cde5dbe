"""Filters by an integer of each query and one of each candidate."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

from fastqt.exclusions.filter import Cells, Filter, check_length
from fastqt.ids import as_ids


@dataclass(frozen=True, eq=False)
class OfIds(Filter):
    """A filter that compares an integer of each query with one of each candidate.

    All losses that take such filters take those of all classes below this one.
    """

    at_most_one = False
    # Whether hard negatives, which are chosen for one query, have its integer, or none that it knows.
    hard_negatives_are_the_querys: ClassVar[bool] = False

    query_ids: Tensor
    candidate_ids: Tensor | None = None
    negative_ids: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("query_ids", "candidate_ids", "negative_ids"):
            if (ids := getattr(self, name)) is not None:
                object.__setattr__(self, name, as_ids(name, ids))

    @staticmethod
    def excludes(query_ids: Tensor, candidate_ids: Tensor) -> Tensor:
        """Which of the cells of some queries with some candidates leave.

        Args:
            query_ids: (n,) int64.
            candidate_ids: (m,) int64, of candidates or of negatives.

        Returns:
            (n, m) bool.
        """
        raise NotImplementedError

    @property
    def columns(self) -> Tensor:
        """The integers of the candidates."""
        return self.query_ids if self.candidate_ids is None else self.candidate_ids

    @property
    def is_of_negatives(self) -> bool:
        return self.negative_ids is not None

    def check(self, name: str, cells: Cells) -> None:
        check_length(name, "query_ids", self.query_ids, cells.N)
        if self.candidate_ids is None and cells.M != cells.N:
            raise ValueError(
                f"{name}: want candidate_ids where there are not as many candidates as queries, "
                f"got M={cells.M}, N={cells.N}"
            )
        check_length(name, "candidate_ids", self.columns, cells.M)
        if self.negative_ids is not None and cells.K is None:
            raise ValueError(f"{name}: want negative_ids with negatives alone")
        if self.negative_ids is not None:
            check_length(name, "negative_ids", self.negative_ids, cells.K)

    def alike(self) -> Hashable:
        return self.name(), self.is_of_negatives

    def turned(self) -> Self:
        if self.is_of_negatives:
            return super().turned()
        return self if self.candidate_ids is None else type(self)(self.candidate_ids, self.query_ids)

    def on(self, device: torch.device) -> Self:
        """The filter with all of its integers, contiguous on a device."""
        return self.with_ids(lambda ids: ids.to(device).contiguous())

    def with_ids(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The filter with each of its tensors changed, and with the candidates' own."""
        negatives = self.negative_ids
        return type(self)(
            change(self.query_ids), change(self.columns), None if negatives is None else change(negatives)
        )

    def with_columns(
        self, candidates: Callable[[Tensor], Tensor], negatives: Callable[[Tensor], Tensor]
    ) -> Self:
        """The filter with other integers of the candidates and of the negatives."""
        of_negatives = self.negative_ids
        return replace(
            self,
            candidate_ids=candidates(self.columns),
            negative_ids=None if of_negatives is None else negatives(of_negatives),
        )


class Same(OfIds):
    """Excludes candidates that have a query's own id, unless they are its target.

    The ids may be those of documents that a batch contains twice, of queries that several documents answer,
    or of classes. A loss takes several, such as `exclude=[Same(query_ids), Same(document_ids)]`.

    Args:
        query_ids: (N,) integers.
        candidate_ids: (M,) integers. Without them candidate i, which is that of query i, has its id.
        negative_ids: (K,) integers, of the loss's `negatives`. Without them these stay.

    Raises:
        ValueError, TypeError: ids that are not 1-D, or no integers.

    Example:
        >>> import torch, fastqt
        >>> queries, documents = torch.randn(2, 4, 16)
        >>> same = fastqt.Same(torch.tensor([7, 7, 8, 9]))  # the first two pairs have the same document
        >>> losses = fastqt.info_nce_loss(queries, documents, exclude=same, reduction="none")
        >>> bool((losses <= fastqt.info_nce_loss(queries, documents, reduction="none")).all())
        True
    """

    @staticmethod
    def excludes(query_ids: Tensor, candidate_ids: Tensor) -> Tensor:
        return query_ids[:, None] == candidate_ids


class Within(OfIds):
    """Lets only candidates of a query's own part compete with each other; all others leave the loss.

    The parts may be data sets, tasks or languages of which a batch has several. Targets stay.

    Args:
        query_ids: (N,) integers, the part of each query.
        candidate_ids: (M,) integers. Without them candidate i, which is that of query i, is in its part.
        negative_ids: (K,) integers, of the loss's `negatives`, which are all there without them.

    Raises:
        ValueError, TypeError: ids that are not 1-D, or no integers.

    Example:
        >>> import torch, fastqt
        >>> queries, documents = torch.randn(2, 4, 16)
        >>> parts = fastqt.Within(torch.tensor([0, 0, 1, 1]))  # two data sets in one batch
        >>> loss = fastqt.info_nce_loss(queries, documents, exclude=parts, reduction="sum")
        >>> apart = [fastqt.info_nce_loss(queries[i : i + 2], documents[i : i + 2]) for i in (0, 2)]
        >>> torch.testing.assert_close(loss, 2 * apart[0] + 2 * apart[1])
    """

    hard_negatives_are_the_querys = True

    @staticmethod
    def excludes(query_ids: Tensor, candidate_ids: Tensor) -> Tensor:
        return query_ids[:, None] != candidate_ids


def groups_of(ids: Sequence[OfIds]) -> Same | None:
    """The filter that engines compare themselves, if it is the only one of integers."""
    one = ids[0] if len(ids) == 1 else None
    return one if isinstance(one, Same) and not one.is_of_negatives else None
