"""InfoNCE: each query's own candidate among all candidates."""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor

from fastqt.distributed.agreement import agree_on_rows
from fastqt.distributed.group import GroupLike
from fastqt.distributed.public import public_loss
from fastqt.functional import contrastive_loss
from fastqt.guide import Guide, check_margin_of_false_negatives
from fastqt.losses.smoothing import check_label_smoothing, smoothing_loss
from fastqt.matryoshka import MatryoshkaLike, prefixes_of
from fastqt.options import Backend, MarginStrategy, Memory, Similarity, TargetReduction
from fastqt.targets import Pairs


@public_loss
def info_nce_loss(
    queries: Tensor,
    candidates: Tensor,
    *,
    scale: float | Tensor = 20.0,
    normalize: bool = True,
    negatives: Tensor | None = None,
    label_smoothing: float = 0.0,
    guide: Guide | None = None,
    false_negative_margin: float | None = None,
    false_negative_margin_strategy: MarginStrategy = "absolute",
    similarity: Similarity = "dot",
    matryoshka: MatryoshkaLike | None = None,
    reduction: TargetReduction = "mean",
    memory: Memory = "fast",
    backend: Backend | None = None,
    group: GroupLike | None = None,
) -> Tensor:
    """Cross-entropy of each query with its own candidate, among all candidates.

    Args:
        queries: (N, D) floating point.
        candidates: (M, D), M >= N; candidate i belongs to query i.
        scale: 1 / temperature, a number or 0-d tensor (differentiable).
        normalize: score by cosine.
        negatives: (K, D) further candidates, which belong to no query.
        label_smoothing: the share of each target that is spread evenly over all candidates and negatives, the
            target included, as in `F.cross_entropy`, whose value this has: the entropy of the smoothed target
            stays in it. In a group each rank has as many candidates as queries then. Not with a guide.
        similarity: "dot", or "euclidean": minus the squared distance, as of `contrastive_loss`. Not with
            label smoothing.
        guide, matryoshka, reduction, memory, backend, group: as of
            `contrastive_loss`.
        false_negative_margin, false_negative_margin_strategy: as of `contrastive_loss`. Not with label
            smoothing.

    Returns:
        A scalar, or (N,) for reduction="none".

    Raises:
        ValueError, TypeError: naming the argument, what is wanted and what came.

    Example:
        >>> import torch, fastqt
        >>> queries, candidates = torch.randn(2, 8, 16)
        >>> hard = torch.randn(24, 16)
        >>> loss = fastqt.info_nce_loss(queries, candidates, scale=1 / 0.05)  # a temperature of 0.05
        >>> bool(fastqt.info_nce_loss(queries, candidates, negatives=hard) > loss)
        True
        >>> round(fastqt.info_nce_loss(torch.eye(4), torch.eye(4), scale=1.0).item(), 4)  # log(e + 3) - 1
        0.7437

    Source: van den Oord et al., "Representation learning with contrastive predictive coding" (2018).
    """
    if guide is not None and label_smoothing:
        raise ValueError("guide: want None with label_smoothing, which gives every candidate mass")
    check_margin_of_false_negatives(false_negative_margin, false_negative_margin_strategy)
    if false_negative_margin is not None and label_smoothing:
        raise ValueError(
            "false_negative_margin: want None with label_smoothing, which gives every candidate mass"
        )
    if similarity == "euclidean" and label_smoothing:
        raise ValueError("similarity: want 'dot' with label_smoothing, got 'euclidean'")
    check_label_smoothing(label_smoothing)
    loss = contrastive_loss(
        queries,
        candidates,
        Pairs(),
        diagonal="keep",
        scale=scale,
        normalize=normalize,
        negatives=negatives,
        guide=guide,
        matryoshka=matryoshka,
        false_negative_margin=false_negative_margin,
        false_negative_margin_strategy=false_negative_margin_strategy,
        reduction=reduction,
        similarity=similarity,
        memory=memory,
        backend=backend,
        group=group,
    )
    if not label_smoothing:
        return loss

    pairs = {"queries": queries}
    if group is not None:
        pairs["candidates"] = candidates

    def check(n: int) -> dict[str, Hashable]:
        return {"label_smoothing": float(label_smoothing)}

    batch, _ = agree_on_rows(group, "fastqt.info_nce_loss", check, {"scale": scale}, **pairs)
    columns = [batch.local("candidates", candidates)]
    if negatives is not None:
        columns.append(batch.local("negatives", negatives))
    rows = batch.local("queries", queries)

    def smoothing(dim: int | None = None) -> Tensor:
        return smoothing_loss(
            label_smoothing,
            rows[:, :dim],
            [x[:, :dim] for x in columns],
            batch,
            scale=scale,
            normalize=normalize,
            reduction=reduction,
        )

    prefixes = prefixes_of(matryoshka)
    return loss + (smoothing() if prefixes is None else prefixes.sum(smoothing))
