"""What leaves a softmax or a sigmoid over a batch: the values of the argument `exclude` of losses.

A candidate that is no negative of a query, although it is not its target, is a false negative. Each class
here says which candidates are. A loss takes one of them or several, of which all leave.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

from fastqt.checks import (
    FLOAT32_MAX,
    FLOATING,
    check_flag,
    check_mask,
    check_number,
    check_option,
    check_tensor,
    shown,
)
from fastqt.guide import MARGIN_STRATEGIES, Guide
from fastqt.ids import as_ids
from fastqt.options import MarginStrategy

Filter = TypeVar("Filter")


@dataclass(frozen=True)
class Margin:
    """Excludes candidates that are more similar to a query than its target by a margin.

    A cell leaves the loss where its similarity, a product or a cosine, is above t + margin, with t that of
    the row's target, of several the least similar. Targets stay, and so do exact copies of them with a margin
    of 0, what `diagonal` replaces, scores that are given, and rows without a target. It takes no product
    more, since engines compare the scores that they have anyway.

    So that copies stay, a threshold is higher by D + 8 roundings, of 2**-24 in float32 and 2**-53 in float64,
    of the product of the target's and the query's norms, of cosines by 2 D + 16; where a CPU multiplies
    bfloat16, by 2**-8 of its size. Similarities are as exact as that, so those above by twice as much leave
    for certain. No gradient flows through the choice. It wants targets as indices, pairs, windows or sparse
    rows, not smoothed, similarity="dot", and a positive 1 / temperature.

    Args:
        margin: a finite number. It is added, where a `Guide` of the same embeddings would take it off.
        strategy: "absolute", or "relative": above t + |t| * margin.
        spare_own_negatives: lets the negatives of a row's own be, which somebody has chosen for it: the
            `row_negatives` of the general losses, and a query's own hard negatives, which other queries may
            still find too similar.

    Raises:
        ValueError, TypeError: naming the argument, what is wanted and what came.

    Example:
        >>> import torch, fastqt
        >>> queries = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> candidates = torch.tensor([[1.0, 1.0], [1.0, 0.0]])  # the second is more like the first query
        >>> fastqt.info_nce_loss(queries, candidates, exclude=fastqt.Margin(0.1), reduction="none")[0].item()
        0.0

    Source: Zhang et al., "Qwen3 Embedding: Advancing text embedding and reranking through foundation models"
    (2025), eq. 2.
    """

    margin: float
    strategy: MarginStrategy = "absolute"
    spare_own_negatives: bool = False

    def __post_init__(self) -> None:
        check_number("margin", self.margin)
        check_flag("spare_own_negatives", self.spare_own_negatives)
        check_option("strategy", self.strategy, MARGIN_STRATEGIES)


@dataclass(frozen=True, eq=False)
class Above:
    """Excludes candidates whose similarity to a query is above a threshold of that query.

    As by `Margin`, with thresholds that are known. Infinity and NaN let all candidates stay.

    Args:
        thresholds: (N,) floating point; no gradient flows to them.

    Raises:
        ValueError, TypeError: naming the argument, what is wanted and what came.

    Example:
        >>> import torch, fastqt
        >>> above = fastqt.Above(torch.tensor([2.0]))
        >>> query, candidates = torch.tensor([[1.0]]), torch.tensor([[3.0], [2.0], [2.0]])
        >>> fastqt.log_sum_exp(query, candidates, exclude=above).sub(2).exp()  # the first candidate has left
        tensor([2.])
    """

    thresholds: Tensor

    def __post_init__(self) -> None:
        check_tensor("thresholds", self.thresholds)
        if self.thresholds.dtype not in FLOATING or self.thresholds.dim() != 1:
            raise TypeError(
                "thresholds: want (N,) numbers of floating point of 16 to 64 bits, got shape "
                f"{tuple(self.thresholds.shape)} of {self.thresholds.dtype}"
            )


@dataclass(frozen=True, eq=False)
class OfIds:
    """A filter that compares an integer of each query with one of each candidate."""

    query_ids: Tensor
    candidate_ids: Tensor | None = None
    negative_ids: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("query_ids", "candidate_ids", "negative_ids"):
            if (ids := getattr(self, name)) is not None:
                object.__setattr__(self, name, as_ids(name, ids))

    @property
    def columns(self) -> Tensor:
        """The integers of the candidates."""
        return self.query_ids if self.candidate_ids is None else self.candidate_ids


class IdCells(NamedTuple):
    """Cells that leave a loss where two integers are equal, or where they differ.

    Attributes:
        queries: (N,) int64, contiguous, as the others.
        candidates: (M,)
        negatives: (K,), or None: no cell of the negatives leaves.
        equal: whether it is where they are equal.
    """

    queries: Tensor
    candidates: Tensor
    negatives: Tensor | None
    equal: bool


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


Exclusion: TypeAlias = Margin | Above | Same | Within | Guide | Tensor
"""A filter, or a bool tensor (N, M) that is True where a cell leaves the loss."""
ExcludeLike: TypeAlias = Exclusion | Sequence[Exclusion]
EVERY_KIND: tuple[type[Any], ...] = (Margin, Above, Same, Within, Guide, Tensor)
NAMES = {Tensor: "a bool tensor"}


@dataclass(frozen=True, eq=False)
class Exclusions:
    """The filters of a call."""

    filters: tuple[Exclusion, ...]

    def of(self, kind: type[Filter]) -> Filter | None:
        """The filter of a kind of which there may be one, None if there is none."""
        return next((x for x in self.filters if isinstance(x, kind)), None)

    @staticmethod
    def is_of_negatives(x: Exclusion) -> bool:
        """Whether a filter says anything of the negatives."""
        return isinstance(x, Guide) or (isinstance(x, OfIds) and x.negative_ids is not None)

    def without(self, kind: type[Any]) -> Exclusions | None:
        """The others."""
        others = tuple(x for x in self.filters if not isinstance(x, kind))
        return Exclusions(others) if others else None

    def turned(self) -> Exclusions:
        """The filters of the candidates as queries, and of the queries as candidates.

        Raises:
            ValueError: a filter that says what it does for the queries alone.
        """
        return Exclusions(tuple(map(_turned, self.filters)))

    @property
    def needs_masks(self) -> bool:
        """Whether what leaves is found some rows at a time, because no engine knows it."""
        of_ids = [x for x in self.filters if isinstance(x, OfIds)]
        alone = len(of_ids) <= 1 and all(isinstance(x, Same) and x.negative_ids is None for x in of_ids)
        return not alone or self.of(Guide) is not None

    @property
    def names(self) -> str:
        """The kinds of the filters, as an error says them."""
        return " and ".join(_name(type(x)) for x in self.filters)

    def ids(self, device: torch.device) -> tuple[IdCells, ...]:
        """What `Same` and `Within` compare, as engines read it."""
        found = []
        for x in self.filters:
            if isinstance(x, OfIds):
                negatives = None if x.negative_ids is None else _on(device, x.negative_ids)
                queries, columns = _on(device, x.query_ids), _on(device, x.columns)
                found.append(IdCells(queries, columns, negatives, isinstance(x, Same)))
        return tuple(found)

    def kind(self) -> Hashable:
        """What all ranks have alike."""
        return tuple(map(_kind, self.filters))


def as_exclusions(name: str, value: object, kinds: tuple[type[Any], ...] = EVERY_KIND) -> Exclusions:
    """What a user has given as `exclude`, as a record.

    Args:
        name: the argument.
        value: a filter or several.
        kinds: the filters that the loss takes.

    Raises:
        ValueError, TypeError: another kind, or two of a kind of which there can be one.
    """
    if isinstance(value, Exclusions):
        return value
    several = isinstance(value, Sequence) and not isinstance(value, str)
    filters: tuple[Any, ...] = tuple(cast(Sequence[Any], value)) if several else (value,)
    for x in filters:
        if not isinstance(x, EVERY_KIND):
            raise TypeError(f"{name}: want {_listed(kinds)}, or a sequence of them, got {shown(x)}")
        if not isinstance(x, kinds):
            raise ValueError(f"{name}: this loss takes {_listed(kinds)}, got {_name(type(x))}")
    for kind in (Margin, Above, Guide, Tensor):
        if sum(isinstance(x, kind) for x in filters) > 1:
            advice = "; join them by |" if kind is Tensor else ""
            what = _name(kind).removeprefix("a ")
            raise ValueError(f"{name}: want at most one {what}, got several{advice}")
    return Exclusions(filters)


def check_exclusions(
    name: str,
    exclusions: Exclusions,
    sizes: Mapping[str, int | None],
    device: torch.device,
    dtype: torch.dtype,
    *,
    of_group: bool,
) -> None:
    """Raises ValueError or TypeError unless filters have something for each row of the embeddings.

    Args:
        name: the argument.
        exclusions: its filters.
        sizes: the numbers of "queries", "candidates" and "negatives" of this process, None where there are
            none.
        device: where the embeddings are.
        dtype: theirs.
        of_group: whether other processes have candidates too.
    """
    N, M, K = (sizes[of] for of in ("queries", "candidates", "negatives"))
    assert N is not None
    assert M is not None
    for x in exclusions.filters:
        if isinstance(x, Tensor):
            check_mask(name, x, N, None if of_group else M, device)
        elif isinstance(x, Guide):
            x.check(N, M, K, device)
        elif isinstance(x, Above):
            _check_length(name, "thresholds", x.thresholds, N)
            if x.thresholds.device != device:
                raise ValueError(f"{name}: want thresholds on {device} as queries, got {x.thresholds.device}")
        elif isinstance(x, OfIds):
            _check_ids(name, x, N, M, K)
        elif dtype is not torch.float64 and abs(x.margin) > FLOAT32_MAX:
            raise ValueError(
                f"{name}: want a margin that float32 holds, at most {FLOAT32_MAX:.4g}, got {x.margin}"
            )


def _check_ids(name: str, x: OfIds, N: int, M: int, K: int | None) -> None:
    _check_length(name, "query_ids", x.query_ids, N)
    if x.candidate_ids is None and M != N:
        raise ValueError(
            f"{name}: want candidate_ids where there are not as many candidates as queries, got M={M}, N={N}"
        )
    _check_length(name, "candidate_ids", x.columns, M)
    if x.negative_ids is not None and K is None:
        raise ValueError(f"{name}: want negative_ids with negatives alone")
    if x.negative_ids is not None:
        _check_length(name, "negative_ids", x.negative_ids, K)


def _check_length(name: str, what: str, x: Tensor, wanted: int | None) -> None:
    if len(x) != wanted:
        raise ValueError(f"{name}: want {wanted} {what}, got {len(x)}")


def _kind(x: Exclusion) -> Hashable:
    if isinstance(x, Margin):
        return x
    if isinstance(x, Guide):
        return ("Guide", *x.kind())
    if isinstance(x, OfIds):
        return type(x).__name__, x.negative_ids is not None
    return _name(type(x))


def _turned(x: Exclusion) -> Exclusion:
    if isinstance(x, Margin):
        return x
    if isinstance(x, Tensor):
        return x.T
    if isinstance(x, OfIds) and x.negative_ids is None:
        return x if x.candidate_ids is None else type(x)(x.candidate_ids, x.query_ids)
    if isinstance(x, Guide) and x.thresholds is None and x.negatives is None:
        return x.turned()
    raise ValueError(
        f"exclude: want a filter of both directions, got {_name(type(x))} of thresholds or negatives"
    )


def _name(kind: type[Any]) -> str:
    return next((text for of, text in NAMES.items() if issubclass(kind, of)), kind.__name__)


def _listed(kinds: tuple[type[Any], ...]) -> str:
    *others, last = map(_name, kinds)
    return f"{', '.join(others)} or {last}" if others else last


def _on(device: torch.device, ids: Tensor) -> Tensor:
    return ids.to(device).contiguous()
