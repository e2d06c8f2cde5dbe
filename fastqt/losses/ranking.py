"""Multiple negatives ranking: each query's own document among all documents, and other directions with it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, get_args

import torch
from torch import Tensor

from fastqt.arguments import Argument, Known, NotNegative, Rows, Scale, exclusions_of
from fastqt.checks import FLOAT32_MAX, check_option, shown
from fastqt.distributed.group import GroupLike
from fastqt.exclusions import ExcludeLike, Exclusions, Margin, OfIds, Padding, Same
from fastqt.functional import contrastive_loss
from fastqt.functional.fitting import fit_padding
from fastqt.loss import Arguments, loss
from fastqt.losses.clip import clip_loss
from fastqt.losses.common import joined_loss, row_numbers
from fastqt.losses.debiasing import Prior, fit_prior, is_debiased
from fastqt.losses.info_nce import info_nce_loss
from fastqt.losses.pair_scores import PairScores, with_hard_negatives
from fastqt.matryoshka import MatryoshkaLike
from fastqt.options import Backend, Direction, HardnessMode, Memory, PartitionMode, Reduction
from fastqt.problem import loss_dtype, unit_rows
from fastqt.targets import Pairs

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
QueryNegatives = Annotated[Tensor | None, Argument(rows="rows")]
Exclude = Annotated[ExcludeLike | None, exclusions_of(Margin, OfIds, Padding)]


def _fit(
    directions: Sequence[Direction],
    partition_mode: PartitionMode,
    hardness_mode: HardnessMode | None,
    hardness_strength: float,
    scale: float | Tensor,
    tau_plus: float | Tensor,
    exclude: Exclusions | None,
    row_negatives: Tensor | None,
    known: Known,
) -> None:
    fit_padding(exclude, row_negatives)
    if hardness_strength and is_debiased(tau_plus):
        raise ValueError("tau_plus: want 0 with a hardness_strength")
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


@loss("MultipleNegativesRankingLoss", check=(_fit, fit_prior), sums_prefixes=False)
def multiple_negatives_ranking_loss(
    call: Arguments,
    queries: Rows,
    documents: Documents,
    *,
    row_negatives: QueryNegatives = None,
    scale: Scale = 20.0,
    normalize: bool = True,
    directions: Directions = ("query_to_doc",),
    partition_mode: PartitionMode = "joint",
    hardness_mode: HardnessMode | None = None,
    hardness_strength: NotNegative = 0.0,
    tau_plus: Prior = 0.0,
    exclude: Exclude = None,
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
        row_negatives: (N, D) or (N, K, D) hard negatives that are candidates of their own query alone.
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
        tau_plus: the share of the negatives of a softmax that are expected to be positives, as of
            `info_nce_loss`.
        exclude: a margin and filters by ids, as of `contrastive_loss`, in all directions. With a margin the
            similarities of row i are compared with that of query i and its positive, those of hard negatives
            too. Ids are those of queries and of positives, and a hard negative is in the part of its query.
            `fastqt.Padding` says which row negatives there are not.
            Directions are then computed apart, in twice the time.
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
        alone = None if row_negatives is None else row_negatives[..., :dim]
        if normalize:
            rows = [unit_rows(x) for x in rows]
            alone = None if alone is None else unit_rows(alone)
        with call.batch.leaving_word():
            losses = _losses(PairScores(call, rows[0], rows[1], rows[2:], alone), call.values)
        return call.batch.reduced(losses, reduction).to(loss_dtype(queries))

    return call.sum_over_prefixes(of_prefix)


def _losses(pairs: PairScores, values: Mapping[str, Any]) -> Tensor:
    """The loss of each row, (n,): its positive in a softmax over the cells of all directions, or of each."""
    positive, softmaxes = _positive_and_softmaxes(pairs, values)
    if is_debiased(values["tau_plus"]):
        with torch.no_grad():
            _, counts = _positive_and_softmaxes(pairs.of_nothing(), values)
        both = zip(softmaxes, counts, strict=True)
        softmaxes = [[pairs.true_negatives(positive, others, of_count)] for others, of_count in both]
    # The score of query and positive is in each direction that has both.
    is_twice = values["partition_mode"] == "joint" and "doc_to_query" in values["directions"]
    losses = [joined_loss(positive, others, copies=2 if is_twice else 1) for others in softmaxes]
    return losses[0] if len(losses) == 1 else torch.stack(losses).mean(0)


def _positive_and_softmaxes(
    pairs: PairScores, values: Mapping[str, Any]
) -> tuple[Tensor, list[list[Tensor]]]:
    """The score of each positive, (n,), and of each softmax the logsumexps of all its other cells."""
    positive, cells = _positive_and_others(pairs, values)
    if values["partition_mode"] == "per_direction":
        return positive, list(cells.values())
    return positive, [[x for of_direction in cells.values() for x in of_direction]]


def _positive_and_others(
    pairs: PairScores, values: Mapping[str, Any]
) -> tuple[Tensor, dict[Direction, list[Tensor]]]:
    """The score of each positive, (n,), and of each direction the logsumexps of all its other cells."""
    directions, hardness = values["directions"], _hardness(values)
    cells: dict[Direction, list[Tensor]] = {}
    # Queries and positives have the same scores in both directions, which one walk then sums.
    if "doc_to_query" in directions and not pairs.is_filtered and hardness in (None, "hard_negatives"):
        positive, to_positives, to_queries = pairs.both_directions()
        cells["query_to_doc"] = [to_positives, *_to_documents(pairs, values, positives=False)]
        cells["doc_to_query"] = [to_queries]
    else:
        positive = pairs.positive
        cells["query_to_doc"] = _to_documents(pairs, values, positives=True)
        if "doc_to_query" in directions:
            cells["doc_to_query"] = [pairs.others("document", "query")]
    if "query_to_query" in directions:
        cells["query_to_query"] = [pairs.own("query")]
    if "doc_to_doc" in directions:
        cells["doc_to_doc"] = [pairs.own("document"), *pairs.with_hard("document")]
    return positive, cells


def _hardness(values: Mapping[str, Any]) -> HardnessMode | None:
    """The mode, if it changes anything."""
    mode: HardnessMode | None = values["hardness_mode"]
    return mode if values["hardness_strength"] else None


def _to_documents(pairs: PairScores, values: Mapping[str, Any], *, positives: bool) -> list[Tensor]:
    """The logsumexps of the queries' scores with documents, (n,) each; not with their own positives.

    `positives` says whether the positives of other queries are among the documents.
    """
    strength, mode = values["hardness_strength"], _hardness(values)
    in_batch = strength if mode in ("in_batch_negatives", "all_negatives") else 0.0
    hard = strength if mode in ("hard_negatives", "all_negatives") else 0.0
    alone = _hardened(pairs, hard, PairScores.with_alone)
    # A row's own negatives are like those of other queries, unless something tells them apart.
    if in_batch == hard and not pairs.ids and not pairs.spares_hard:
        every = _hardened(pairs, hard, lambda raised: raised.with_all_documents(positives=positives))
        return every + alone

    def of_others(raised: PairScores) -> list[Tensor]:
        to_positives = [raised.others("query", "document")] if positives else []
        return to_positives + raised.with_hard("query")

    return _hardened(pairs, in_batch, of_others) + _hardened(pairs, hard, PairScores.with_own_hard) + alone


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
            info_nce_loss,
            rows,
            queries=queries,
            candidates=positives,
            negatives=negatives,
            row_negatives=values["row_negatives"],
            exclude=exclude,
        )
    has_hard = negatives is not None or values["row_negatives"] is not None
    if values["partition_mode"] == "per_direction" and not has_hard and exclude is None:
        return call.to(clip_loss, a=queries, b=positives)
    of_ids = exclude is not None and exclude.of(OfIds) is not None
    one_softmax = not of_ids and not is_debiased(values["tau_plus"]) and call.batch.is_of_process
    if directions == ("query_to_doc", "query_to_query") and one_softmax:
        # A query leaves its own softmax as one of its id, in which its positive stays as a target.
        ids = row_numbers(len(queries), queries.device)
        return call.to(
            contrastive_loss,
            queries=queries,
            candidates=torch.cat([positives, queries]),
            targets=Pairs(),
            diagonal="keep",
            negatives=negatives,
            row_negatives=values["row_negatives"],
            exclude=Exclusions((Same(ids, torch.cat([ids, ids])), *(exclude.filters if exclude else ()))),
        )
    return None


def _hardened(pairs: PairScores, strength: float, sums: Callable[[PairScores], list[Tensor]]) -> list[Tensor]:
    """Scores, or logsumexps of them, to which strength times the cosine is added without a gradient.

    These are scores of the scale s + strength, whose gradient with respect to the embeddings is s / (s +
    strength) times as large, and with respect to the scale as it is.
    """
    if not strength:
        return sums(pairs)
    scale = pairs.scoring.scale
    raised = scale + strength
    share = (scale / raised).detach() if isinstance(raised, Tensor) else scale / raised
    if isinstance(raised, Tensor):
        raised = _with_gradient_times(raised, 1 / share)
    return [_with_gradient_times(x, share) for x in sums(pairs.at(raised))]


def _with_gradient_times(x: Tensor, factor: float | Tensor) -> Tensor:
    """`x` as it is, whose gradient is multiplied."""
    # Minus infinity, of a row that has no cells, would become NaN.
    more = (factor - 1) * x.clamp(min=torch.finfo(x.dtype).min)
    return x + (more - more.detach())
