"""InfoNCE: each query's own candidate among all candidates."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from fastqt.arguments import OwnRows, Rows, Scale, Share
from fastqt.distributed.batch import Batch
from fastqt.distributed.group import GroupLike
from fastqt.exclusions import ExcludeLike, Exclusions
from fastqt.functional import contrastive_loss
from fastqt.loss import Arguments, loss
from fastqt.losses.common import scores
from fastqt.matryoshka import MatryoshkaLike
from fastqt.options import Backend, Memory, Reduction, Similarity, TargetReduction
from fastqt.problem import loss_dtype
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


def smoothing_loss(call: Arguments, queries: Tensor, columns: Sequence[Tensor]) -> Tensor:
    """What label smoothing adds to the loss of queries among candidates and negatives, without a matrix.

    With a share e of the target's mass spread evenly over all C cells of the row, the cross-entropy
    -sum_j ((1 - e) [j = i] + e / C) log P_ij is that of the target alone, plus e (S_ii - mean_j S_ij). The
    mean of a row's scores is its score with the mean of the candidates.

    Args:
        call: the loss.
        queries: (N, D).
        columns: (M, D) candidates, of which candidate i belongs to query i, and (K, D) further ones.
    """
    dtype, values = loss_dtype(queries), call.values
    embeddings = [x.to(dtype) for x in (queries, *columns)]
    if values["normalize"]:
        embeddings = [F.normalize(x, dim=1) for x in embeddings]
    queries, *columns = embeddings
    leads = scores(queries, columns[0][: len(queries)] - _mean_of(columns, call.batch), values["scale"])

    # Every row has a target.
    reduction: Reduction = "mean" if values["reduction"] == "mean_of_targets" else values["reduction"]
    return call.batch.reduced(values["label_smoothing"] * leads, reduction)


def _mean_of(columns: Sequence[Tensor], batch: Batch) -> Tensor:
    """The mean of the rows of several matrices, those of all ranks: (D,)."""
    total = sum((x.sum(0) for x in columns[1:]), columns[0].sum(0))
    return batch.sum_over_ranks(total) / batch.sum_of_lengths(sum(map(len, columns)), total.device)
