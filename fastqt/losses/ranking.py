"""Multiple negatives ranking: each query's own document among all documents, and other directions with it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, get_args

import torch
from torch import Tensor

from fastqt.arguments import Argument, Known, NotNegative, Rows, Scale
from fastqt.checks import FLOAT32_MAX, check_option, shown
from fastqt.distributed.group import GroupLike
from fastqt.exclusions import Exclusions, Margin, OfIds, Same
from fastqt.functional import contrastive_loss
from fastqt.loss import Arguments, loss
from fastqt.losses.clip import clip_loss
from fastqt.losses.common import filtered_scores, joined_loss, row_numbers, row_thresholds, scores
from fastqt.losses.info_nce import info_nce_loss
from fastqt.losses.pair_filters import PairExclude, PairFilters, Side, with_hard_negatives
from fastqt.losses.paired_sums import (
    PairScoring,
    others_than_own,
    own_sums,
    paired_sums,
    scoring_of,
    shares_scores,
    sums_of,
)
from fastqt.matryoshka import MatryoshkaLike
from fastqt.options import Backend, Direction, HardnessMode, Memory, PartitionMode, Reduction
from fastqt.problem import loss_dtype, unit_rows
from fastqt.targets import Pairs
from fastqt.torch_modes import input_dtype

DIRECTIONS: tuple[Direction, ...] = get_args(Direction)
WITHOUT_POSITIVES = ("query_to_query", "doc_to_doc")


def _matrices(name: str, value: Any) -> dict[str, Tensor]:
    """The positives and the hard negatives, each with its name."""
    if isinstance(value, Tensor):
        return {name: value}
    if not isinstance(value, Sequence):
        raise TypeError(f"{name}: want a tensor or a sequence of them, got {type(value).__name__}")
    if not value:
        raise ValueError(f"{name}: want at least the positives, got an empty sequence")
    return {f"{name}[{i}]" if i else name: x for i, x in enumerate(value)}


def _directions(name: str, value: Any, known: Known) -> tuple[Direction, ...]:
    """The directions in a fixed order."""
    if isinstance(value, str) or not isinstance(value, Sequence | set | frozenset):
        advice = "; put the name into a list" if isinstance(value, str) else ""
        raise TypeError(f"{name}: want a sequence of names, got {shown(value)}{advice}")
    for each in value:
        check_option(name, each, DIRECTIONS)
    if "query_to_doc" not in value:
        raise ValueError(f"{name}: want 'query_to_doc' among them, got {shown(value)}")
    return tuple(each for each in DIRECTIONS if each in value)


Documents = Annotated[Tensor | Sequence[Tensor], Argument(rows="rows", matrices=_matrices)]
Directions = Annotated[Sequence[Direction], Argument(_directions)]


def _fit(
    directions: Sequence[Direction],
    partition_mode: PartitionMode,
    hardness_mode: HardnessMode | None,
    hardness_strength: float,
    scale: float | Tensor,
    known: Known,
) -> None:
    without = [name for name in directions if name in WITHOUT_POSITIVES]
    if partition_mode == "per_direction" and without:
        raise ValueError(
            f"partition_mode: want 'joint' with {without[0]!r}, whose scores do not contain the positive, "
            "got 'per_direction'"
        )
    if hardness_mode is None and hardness_strength:
        raise ValueError(f"hardness_strength: want it with a hardness_mode alone, got {hardness_strength}")
    most = sys.float_info.max if known.dtype is torch.float64 else FLOAT32_MAX
    if not isinstance(scale, Tensor) and not scale + hardness_strength <= most:
        raise ValueError(
            f"hardness_strength: want at most {most:.4g} together with the scale, which is {scale}, "
            f"got {hardness_strength}"
        )


@loss("MultipleNegativesRankingLoss", check=_fit, sums_prefixes=False)
def multiple_negatives_ranking_loss(
    call: Arguments,
    queries: Rows,
    documents: Documents,
    *,
    scale: Scale = 20.0,
    normalize: bool = True,
    directions: Directions = ("query_to_doc",),
    partition_mode: PartitionMode = "joint",
    hardness_mode: HardnessMode | None = None,
    hardness_strength: NotNegative = 0.0,
    exclude: PairExclude = None,
    matryoshka: MatryoshkaLike | None = None,
    reduction: Reduction = "mean",
    memory: Memory = "fast",
    backend: Backend | None = None,
    group: GroupLike | None = None,
) -> Tensor:
    """Cross-entropy of each query with its own document, among the scores of one or several directions.

    Query i's first document is its positive, and its others are its hard negatives; all are negatives of
    other queries. The scores of row i are, with s the scale and cos the cosine,

        "query_to_doc":   s cos(query i, every document)
        "query_to_query": s cos(query i, every other query)
        "doc_to_query":   s cos(positive i, every query)
        "doc_to_doc":     s cos(positive i, every document of other queries)

    The positive is in each direction that has both a query and a document; a joint softmax of these two has
    it twice.

    Args:
        queries: (N, D) floating point.
        documents: (N, D), a positive for each query, or a sequence of such matrices: the positives, and then
            one or more hard negatives for each query.
        scale: 1 / temperature, a number or 0-d tensor (differentiable).
        normalize: score by cosine; otherwise by inner product.
        directions: which scores there are; "query_to_doc" has to be one of them.
        partition_mode: "joint": the loss is the cross-entropy of one softmax over all of them;
            "per_direction": the mean of the cross-entropies of a softmax for each, which have to contain
            the positive ("query_to_doc" and "doc_to_query").
        hardness_mode: which scores of "query_to_doc" are raised by hardness_strength times the cosine,
            through which no gradient flows: those of "in_batch_negatives", which are documents of other
            queries, of "hard_negatives", which are the query's own, or of "all_negatives".
        hardness_strength: a number >= 0, often from 5 to 9.
        exclude: `fastqt.Margin`, `fastqt.Same` and `fastqt.Within`, as of `contrastive_loss`, in all
            directions. With a margin the similarities of row i are compared with that of query i and its
            positive, those of hard negatives too. Ids are those of queries and of positives, and a hard
            negative is in the part of its query. Directions are then computed apart, in twice the time.
        reduction: "mean" over all rows, "sum", or "none".
        matryoshka: as of `contrastive_loss`. A joint softmax with several directions, and one with a
            hardness_strength, is a loss of its own for each prefix.
        memory, backend, group: as of `contrastive_loss`. In a group each rank gives its own
            queries with their documents.

    Returns:
        A scalar, or (N,) for reduction="none".

    Raises:
        ValueError, TypeError: naming the argument, what is wanted and what came.

    Example:
        >>> import torch, fastqt
        >>> queries, positives, hard_negatives = torch.randn(3, 8, 16)
        >>> loss = fastqt.multiple_negatives_ranking_loss
        >>> loss(queries, [positives, hard_negatives], reduction="none").shape
        torch.Size([8])
        >>> bool(loss(queries, positives) == fastqt.info_nce_loss(queries, positives))
        True
        >>> loss(queries, positives, directions=("query_to_doc", "doc_to_query", "doc_to_doc")).shape
        torch.Size([])

    Source: Henderson et al., "Efficient natural language response suggestion for Smart Reply" (2017);
    for several directions Li et al., "Towards general text embeddings with multi-stage contrastive
    learning" (2023), eq. 3; for hardness Lan et al., "LLaVE: Large language and vision embedding models
    with hardness-weighted contrastive learning" (2025), eq. 5; for false negatives Zhang et al., "Qwen3
    Embedding: Advancing text embedding and reranking through foundation models" (2025).
    """
    positives, *hard_negatives = (documents,) if isinstance(documents, Tensor) else documents
    alone = _as_one_loss(call, queries, positives, hard_negatives)
    if alone is not None:
        return alone

    def of_prefix(dim: int | None) -> Tensor:
        rows = [x[:, :dim] for x in (queries, positives, *hard_negatives)]
        cells = _Cells(call, [unit_rows(x) for x in rows] if normalize else rows)
        with call.batch.leaving_word():
            losses = _losses(cells)
        return call.batch.reduced(losses, reduction).to(loss_dtype(queries))

    return call.sum_over_prefixes(of_prefix)


def _losses(cells: _Cells) -> Tensor:
    """The loss of each row, (n,): its positive in a softmax over the cells of all directions, or of each."""
    positive, of_direction = cells.positive_and_sums()
    if cells.values["partition_mode"] == "per_direction":
        return torch.stack([joined_loss(positive, sums) for sums in of_direction.values()]).mean(0)
    every = [x for sums in of_direction.values() for x in sums]
    # The score of query and positive is in each direction that has both.
    return joined_loss(positive, every, copies=2 if "doc_to_query" in of_direction else 1)


class _Cells:
    """The scores of the directions.

    Attributes:
        local: queries, positives and sets of hard negatives of this process, (n, D) each.
        every: the same of all ranks, this rank's first, (N, D) each; of one process `local`.
    """

    def __init__(self, call: Arguments, local: Sequence[Tensor]) -> None:
        self.local, self.values = local, call.values
        self.directions: tuple[Direction, ...] = call.values["directions"]
        exclude: Exclusions | None = call.values["exclude"]
        batch, self.scoring = call.batch, scoring_of(call)
        margin = None if exclude is None else exclude.of(Margin)
        self.above = row_thresholds(local[0], local[1], margin)
        self.spares_hard_negatives = margin is not None and margin.spare_own_negatives
        self.filters = None if exclude is None else PairFilters(exclude, batch, self.above)
        with batch.agreeing():
            self.has_walks = self.filters is None and shares_scores(local[0], batch.total(), self.scoring)
        self.every = [self._all_queries()]
        self.every += [batch.gather_own_first(x, dtype=input_dtype(x)) for x in local[1:]]

    @property
    def hardness(self) -> str | None:
        """The mode, if it changes anything."""
        return self.values["hardness_mode"] if self.values["hardness_strength"] else None

    @property
    def is_symmetric(self) -> bool:
        """Whether queries and positives have the same scores in both directions, which one walk then sums."""
        symmetric = self.filters is None and self.hardness in (None, "hard_negatives")
        return "doc_to_query" in self.directions and symmetric

    def positive_and_sums(self) -> tuple[Tensor, dict[Direction, list[Tensor]]]:
        """The score of each positive, (n,), and of each direction the logsumexps of all its other cells."""
        queries, positives, *_ = self.local
        all_queries, all_positives, *all_negatives = self.every
        scoring, between = self.scoring, self._between

        sums: dict[Direction, list[Tensor]] = {}
        if self.is_symmetric:
            positive, of_queries, of_positives = paired_sums(
                queries, all_positives, positives, all_queries, scoring
            )
            sums["query_to_doc"] = [of_queries, *self._to_documents(with_positives=False)]
            sums["doc_to_query"] = [of_positives]
        else:
            positive = scores(queries, positives, scoring.scale)
            sums["query_to_doc"] = self._to_documents(with_positives=True)
            if "doc_to_query" in self.directions:
                exclude = between("document", "query")
                sums["doc_to_query"] = [others_than_own(positives, all_queries, scoring, exclude)]

        if "query_to_query" in self.directions:
            sums["query_to_query"] = [own_sums(queries, all_queries, scoring, between("query", "query"))]
        if "doc_to_doc" in self.directions:
            exclude = between("document", "document")
            sums["doc_to_doc"] = [own_sums(positives, all_positives, scoring, exclude)]
            exclude = self._of_hard_negatives("document")
            sums["doc_to_doc"] += [others_than_own(positives, x, scoring, exclude) for x in all_negatives]
        return positive, sums

    def _between(self, rows: Side, columns: Side) -> Any:
        return None if self.filters is None else self.filters.between(rows, columns)

    def _of_hard_negatives(self, rows: Side) -> Any:
        return None if self.filters is None else self.filters.of_hard_negatives(rows)

    def _to_documents(self, *, with_positives: bool) -> list[Tensor]:
        """The logsumexps of the queries' scores with documents, (n,) each; not with their own positives.

        `with_positives` says whether the positives of other queries are among the documents.
        """
        queries, _, *hard_negatives = self.local
        positives, negatives = self.every[1:2] if with_positives else [], self.every[2:]
        of_positives, of_negatives = self._between("query", "document"), self._of_hard_negatives("query")
        strength, mode = self.values["hardness_strength"], self.hardness
        in_batch = strength if mode in ("in_batch_negatives", "all_negatives") else 0.0
        hard = strength if mode in ("hard_negatives", "all_negatives") else 0.0

        def others(scoring: PairScoring) -> list[Tensor]:
            found = [others_than_own(queries, x, scoring, of_positives) for x in positives]
            return found + [others_than_own(queries, x, scoring, of_negatives) for x in negatives]

        def all_at_once(scoring: PairScoring) -> list[Tensor]:
            joined = torch.cat(negatives) if negatives else None
            if positives:
                return [others_than_own(queries, positives[0], scoring, of_positives, negatives=joined)]
            return [] if joined is None else [sums_of(queries, joined, scoring, of_negatives)]

        def alone(scoring: PairScoring) -> list[Tensor]:
            above = [] if self.spares_hard_negatives else self.above
            return [filtered_scores(queries, x, scoring.scale, above) for x in hard_negatives]

        # A row's own negatives are like those of other queries, unless something tells them apart.
        told_apart = self.filters is not None and (self.filters.of_ids or self.spares_hard_negatives)
        if in_batch == hard and not told_apart:
            return _hardened(self.scoring, hard, all_at_once)
        return _hardened(self.scoring, in_batch, others) + _hardened(self.scoring, hard, alone)

    def _all_queries(self) -> Tensor:
        """The queries of all ranks; where nothing flows back to them, the rank's own rows stand for them."""
        queries, batch = self.local[0], self.scoring.batch
        among_queries = "query_to_query" in self.directions
        to_documents = "doc_to_query" in self.directions
        if (among_queries and not self.has_walks) or (
            to_documents and not (self.has_walks and self.is_symmetric)
        ):
            return batch.gather_own_first(queries, dtype=input_dtype(queries))
        return (
            batch.gather_own_first(queries.detach(), dtype=input_dtype(queries)) if among_queries else queries
        )


def _as_one_loss(
    call: Arguments, queries: Tensor, positives: Tensor, hard_negatives: Sequence[Tensor]
) -> Tensor | None:
    """The loss as one softmax over candidates or as CLIP's; None if it is neither."""
    values, exclude = call.values, call.values["exclude"]
    directions = values["directions"]
    if values["hardness_mode"] is not None and values["hardness_strength"]:
        return None

    margin = None if exclude is None else exclude.of(Margin)
    if hard_negatives and margin is not None and margin.spare_own_negatives:
        return None

    negatives = torch.cat(list(hard_negatives)) if hard_negatives else None
    rows: Mapping[str, str | tuple[str, int]]
    rows = {"rows": "rows", "candidates": "rows", "negatives": ("rows", len(hard_negatives))}
    exclude = with_hard_negatives(exclude, len(queries), negatives, repeated="all")
    if directions == ("query_to_doc",):
        return call.to(
            info_nce_loss, rows, queries=queries, candidates=positives, negatives=negatives, exclude=exclude
        )
    if values["partition_mode"] == "per_direction" and negatives is None and exclude is None:
        return call.to(clip_loss, a=queries, b=positives)
    of_ids = exclude is not None and exclude.of(OfIds) is not None
    if directions == ("query_to_doc", "query_to_query") and not of_ids and call.batch.is_of_process:
        # A query leaves its own softmax as one of its id, in which its positive stays as a target.
        ids = row_numbers(len(queries), queries.device)
        return call.to(
            contrastive_loss,
            queries=queries,
            candidates=torch.cat([positives, queries]),
            targets=Pairs(),
            diagonal="keep",
            negatives=negatives,
            exclude=Exclusions((Same(ids, torch.cat([ids, ids])), *(exclude.filters if exclude else ()))),
        )
    return None


def _hardened(
    scoring: PairScoring, strength: float, sums: Callable[[PairScoring], list[Tensor]]
) -> list[Tensor]:
    """Scores, or logsumexps of them, to which strength times the cosine is added without a gradient.

    These are scores of the scale s + strength, whose gradient with respect to the embeddings is s / (s +
    strength) times as large, and with respect to the scale as it is.
    """
    if not strength:
        return sums(scoring)
    raised = scoring.scale + strength
    share = (scoring.scale / raised).detach() if isinstance(raised, Tensor) else scoring.scale / raised
    if isinstance(raised, Tensor):
        raised = _with_gradient_times(raised, 1 / share)
    return [_with_gradient_times(x, share) for x in sums(scoring._replace(scale=raised))]


def _with_gradient_times(x: Tensor, factor: float | Tensor) -> Tensor:
    """`x` as it is, whose gradient is multiplied."""
    # Minus infinity, of a row that has no cells, would become NaN.
    more = (factor - 1) * x.clamp(min=torch.finfo(x.dtype).min)
    return x + (more - more.detach())
