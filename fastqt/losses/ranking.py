"""Multiple negatives ranking: each query's own document among all documents, and other directions with it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fastqt.distributed.agreement import agree_on_rows
from fastqt.distributed.group import GroupLike
from fastqt.distributed.public import public_loss
from fastqt.functional import contrastive_loss
from fastqt.losses.clip import clip_loss
from fastqt.losses.common import (
    filtered_scores,
    joined_loss,
    row_numbers,
    scores,
    similarity_thresholds,
)
from fastqt.losses.info_nce import info_nce_loss
from fastqt.losses.paired_sums import (
    Walk,
    others_than_own,
    own_sums,
    paired_sums,
    shares_scores,
    sums_of,
)
from fastqt.losses.ranking_options import Options, checked_directions
from fastqt.matryoshka import MatryoshkaLike
from fastqt.options import (
    Backend,
    Direction,
    HardnessMode,
    MarginStrategy,
    Memory,
    PartitionMode,
    Reduction,
)
from fastqt.problem import loss_dtype, unit_rows
from fastqt.targets import Pairs
from fastqt.torch_modes import input_dtype

FUNCTION = "fastqt.multiple_negatives_ranking_loss"


@public_loss
def multiple_negatives_ranking_loss(
    queries: Tensor,
    documents: Tensor | Sequence[Tensor],
    *,
    scale: float | Tensor = 20.0,
    normalize: bool = True,
    directions: Sequence[Direction] = ("query_to_doc",),
    partition_mode: PartitionMode = "joint",
    hardness_mode: HardnessMode | None = None,
    hardness_strength: float = 0.0,
    matryoshka: MatryoshkaLike | None = None,
    false_negative_margin: float | None = None,
    false_negative_margin_strategy: MarginStrategy = "absolute",
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
        false_negative_margin, false_negative_margin_strategy: as of `contrastive_loss`. In all directions the
            similarities of row i are compared with that of query i and its positive, those of hard negatives
            too. The two directions between queries and documents are then computed apart, in twice the time.
        reduction: "mean" over all rows, "sum", or "none".
        matryoshka: as of `contrastive_loss`. A joint softmax with several
            directions, and one with a hardness_strength, is a loss of its own for each prefix.
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
    columns = (documents,) if isinstance(documents, Tensor) else _columns(documents)
    o = Options(
        scale=scale,
        normalize=normalize,
        directions=checked_directions(directions, partition_mode),
        partition_mode=partition_mode,
        hardness_mode=hardness_mode,
        hardness_strength=hardness_strength,
        false_negative_margin=false_negative_margin,
        false_negative_margin_strategy=false_negative_margin_strategy,
        reduction=reduction,
        memory=memory,
        backend=backend,
        matryoshka=matryoshka,
    )
    names = [f"documents[{i}]" if i else "documents" for i in range(len(columns))]

    def check(n: int) -> dict[str, Hashable]:
        o.check(queries)
        return {
            "normalize": o.normalize,
            "directions": o.directions,
            "partition_mode": o.partition_mode,
            "hardness_mode": o.hardness_mode,
            "hardness_strength": float(o.hardness_strength),
            "false_negative_margin": o.false_negative_margin,
            "false_negative_margin_strategy": o.false_negative_margin_strategy,
            "reduction": o.reduction,
            "matryoshka": o.prefixes,
        }

    batch, own = agree_on_rows(
        group, FUNCTION, check, {"scale": scale}, queries=queries, **dict(zip(names, columns, strict=True))
    )
    queries, *documents = own
    simple = _of_one_call(queries, documents, o, group)
    if simple is not None:
        return simple
    if o.prefixes is not None:
        options = o._replace(matryoshka=None)._asdict()
        return o.prefixes.sum(
            lambda dim: multiple_negatives_ranking_loss(
                queries[:, :dim], [x[:, :dim] for x in columns], **options, group=group
            )
        )

    own = [unit_rows(x) for x in own] if normalize else own
    margin = o.false_negative_margin, o.false_negative_margin_strategy
    walk = Walk(scale, memory, backend, batch, FUNCTION, similarity_thresholds(own[0], own[1], *margin))
    with batch.agreeing():
        has_walks = shares_scores(own[0], batch.total(), walk)
    every = [_all_queries(own[0], o, walk, has_walks)]
    every += [batch.gather_own_first(x, dtype=input_dtype(x)) for x in own[1:]]
    with batch.leaving_word():
        losses = _row_losses(_Rows(own, every, o, walk))
    return batch.reduced(losses, reduction).to(loss_dtype(queries))


def _columns(documents: object) -> tuple[Tensor, ...]:
    if not isinstance(documents, Sequence):
        raise TypeError(f"documents: want a tensor or a sequence of them, got {type(documents).__name__}")
    if not documents:
        raise ValueError("documents: want at least the positives, got an empty sequence")
    return tuple(documents)


def _of_one_call(
    queries: Tensor, documents: Sequence[Tensor], o: Options, group: GroupLike | None
) -> Tensor | None:
    """The loss as one softmax over candidates or as CLIP's; None if it is neither."""
    positives, *others = documents
    negatives = torch.cat(others) if others else None
    if o.hardness is not None:
        return None

    if o.directions == ("query_to_doc",):
        return info_nce_loss(
            queries,
            positives,
            scale=o.scale,
            normalize=o.normalize,
            negatives=negatives,
            matryoshka=o.matryoshka,
            false_negative_margin=o.false_negative_margin,
            false_negative_margin_strategy=o.false_negative_margin_strategy,
            reduction=o.reduction,
            memory=o.memory,
            backend=o.backend,
            group=group,
        )

    if o.partition_mode == "per_direction" and negatives is None and o.false_negative_margin is None:
        return clip_loss(
            queries,
            positives,
            scale=o.scale,
            normalize=o.normalize,
            matryoshka=o.matryoshka,
            reduction=o.reduction,
            memory=o.memory,
            backend=o.backend,
            group=group,
        )

    if o.directions == ("query_to_doc", "query_to_query") and group is None:
        # A query leaves its own softmax as one of its group, in which its positive stays as a target.
        ids = row_numbers(len(queries), queries.device)
        return contrastive_loss(
            queries,
            torch.cat([positives, queries]),
            Pairs(),
            diagonal="keep",
            scale=o.scale,
            normalize=o.normalize,
            negatives=negatives,
            query_groups=ids,
            candidate_groups=torch.cat([ids, ids]),
            matryoshka=o.matryoshka,
            false_negative_margin=o.false_negative_margin,
            false_negative_margin_strategy=o.false_negative_margin_strategy,
            reduction=o.reduction,
            memory=o.memory,
            backend=o.backend,
        )
    return None


class _Rows(NamedTuple):
    """The rows of the loss and what they are scored with."""

    own: Sequence[Tensor]  # queries, positives and hard negatives of this process, (n, D) each
    every: Sequence[Tensor]  # the same of all ranks, this rank's first, (N, D) each; of one process `own`
    o: Options
    walk: Walk  # how scores are computed


def _row_losses(rows: _Rows) -> Tensor:
    """The loss of each row, (n,)."""
    o, walk, (queries, positives, *_) = rows.o, rows.walk, rows.own
    all_queries, all_positives, *all_negatives = rows.every

    backward: list[Tensor] = []  # of the direction from documents to queries
    shared = _shares_scores(o)
    if shared:
        positive, of_row, of_column = paired_sums(queries, all_positives, positives, all_queries, walk)
        forward, backward = [of_row], [of_column]
    else:
        positive, forward = scores(queries, positives, o.scale), []
        if "doc_to_query" in o.directions:
            backward = [others_than_own(positives, all_queries, walk)]
    forward += _to_documents(rows, with_positives=not shared)

    if o.partition_mode == "per_direction":
        losses = [joined_loss(positive, x) for x in (forward, backward) if x]
        return torch.stack(losses).mean(0)

    if "query_to_query" in o.directions:
        forward.append(own_sums(queries, all_queries, walk))
    if "doc_to_doc" in o.directions:
        forward.append(own_sums(positives, all_positives, walk))
        forward += [others_than_own(positives, x, walk) for x in all_negatives]
    return joined_loss(positive, [*forward, *backward], copies=2 if backward else 1)


def _shares_scores(o: Options) -> bool:
    """Whether queries and positives have the same scores in both directions, so that one walk sums both."""
    return "doc_to_query" in o.directions and o.hardness in (None, "hard_negatives")


def _to_documents(rows: _Rows, *, with_positives: bool) -> list[Tensor]:
    """The logsumexps of the queries' scores with documents, (n,) each; not with their own positives.

    `with_positives` says whether the positives of other queries are among the documents.
    """
    o, walk, (queries, _, *own) = rows.o, rows.walk, rows.own
    positives, negatives = rows.every[1:2] if with_positives else [], rows.every[2:]
    in_batch = o.hardness_strength if o.hardness in ("in_batch_negatives", "all_negatives") else 0.0
    hard = o.hardness_strength if o.hardness in ("hard_negatives", "all_negatives") else 0.0
    if in_batch == hard:  # A row's own negatives are like those of other queries.
        return _hardened(walk, hard, lambda w: _sums(queries, positives, negatives, w))
    found = _hardened(
        walk, in_batch, lambda w: [others_than_own(queries, x, w) for x in (*positives, *negatives)]
    )
    return found + _hardened(
        walk, hard, lambda w: [filtered_scores(queries, x, w.scale, w.thresholds) for x in own]
    )


def _sums(
    queries: Tensor, positives: Sequence[Tensor], negatives: Sequence[Tensor], walk: Walk
) -> list[Tensor]:
    """The logsumexp of the scores with other queries' positives, if given, and with all negatives."""
    joined = torch.cat([*negatives]) if negatives else None
    if positives:
        return [others_than_own(queries, positives[0], walk, negatives=joined)]
    return [] if joined is None else [sums_of(queries, joined, walk)]


def _hardened(walk: Walk, strength: float, found: Callable[[Walk], list[Tensor]]) -> list[Tensor]:
    """Scores, or logsumexps of them, to which strength times the cosine is added without a gradient.

    These are scores of the scale s + strength, whose gradient with respect to the embeddings is s / (s +
    strength) times as large, and with respect to the scale as it is.
    """
    if not strength:
        return found(walk)
    raised = walk.scale + strength
    share = (walk.scale / raised).detach() if isinstance(raised, Tensor) else walk.scale / raised
    if isinstance(raised, Tensor):
        raised = _with_gradient_times(raised, 1 / share)
    return [_with_gradient_times(x, share) for x in found(walk._replace(scale=raised))]


def _with_gradient_times(x: Tensor, factor: float | Tensor) -> Tensor:
    """`x` as it is, whose gradient is multiplied."""
    # Minus infinity, of a row that has no cells, would become NaN.
    more = (factor - 1) * x.clamp(min=torch.finfo(x.dtype).min)
    return x + (more - more.detach())


def _all_queries(queries: Tensor, o: Options, walk: Walk, has_walks: bool) -> Tensor:
    """The queries of all ranks; where nothing flows back to them, the rank's own rows stand for them."""
    gather = partial(walk.batch.gather_own_first, dtype=input_dtype(queries))
    among_queries = "query_to_query" in o.directions
    if among_queries and not has_walks:
        return gather(queries)
    if "doc_to_query" in o.directions and not (has_walks and _shares_scores(o)):
        return gather(queries)
    return gather(queries.detach()) if among_queries else queries
