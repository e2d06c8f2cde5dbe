"""InfoNCE: each query's own candidate among all candidates."""

from __future__ import annotations

from torch import Tensor

from fastqt.arguments import OwnRows, Rows, Scale, Share
from fastqt.distributed.group import GroupLike
from fastqt.exclusions import ExcludeLike, Exclusions
from fastqt.functional import contrastive_loss
from fastqt.loss import Arguments, loss
from fastqt.losses.smoothing import smoothing_loss
from fastqt.matryoshka import MatryoshkaLike
from fastqt.options import Backend, Memory, Similarity, TargetReduction
from fastqt.targets import Pairs


def _fit(label_smoothing: float, exclude: Exclusions | None, similarity: Similarity) -> None:
    if label_smoothing and exclude is not None:
        raise ValueError("exclude: want None with label_smoothing, which gives every candidate mass")
    if label_smoothing and similarity == "euclidean":
        raise ValueError("similarity: want 'dot' with label_smoothing, got 'euclidean'")


@loss("InfoNCELoss", check=_fit, sums_prefixes=False)
def info_nce_loss(
    call: Arguments,
    queries: Rows,
    candidates: OwnRows,
    *,
    scale: Scale = 20.0,
    normalize: bool = True,
    negatives: OwnRows | None = None,
    label_smoothing: Share = 0.0,
    exclude: ExcludeLike | None = None,
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
            stays in it. Not with `exclude`.
        similarity: "dot", or "euclidean": minus the squared distance, as of `contrastive_loss`. Not with
            label smoothing.
        exclude, matryoshka, reduction, memory, backend, group: as of `contrastive_loss`.

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
    unsmoothed = call.to(
        contrastive_loss,
        queries=queries,
        candidates=candidates,
        negatives=negatives,
        targets=Pairs(),
        diagonal="keep",
    )
    if not label_smoothing:
        return unsmoothed
    columns = [candidates] if negatives is None else [candidates, negatives]

    def smoothing(dim: int | None) -> Tensor:
        return smoothing_loss(call, queries[:, :dim], [x[:, :dim] for x in columns])

    return unsmoothed + call.sum_over_prefixes(smoothing)
