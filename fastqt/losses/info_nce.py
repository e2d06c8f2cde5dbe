"""InfoNCE: each query's own candidate among all candidates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastqt.arguments import OwnRows, Rows, Scale, Share
from fastqt.distributed.batch import Batch
from fastqt.distributed.group import GroupLike
from fastqt.exclusions import Above, ExcludeLike, Exclusions, Margin
from fastqt.functional import contrastive_loss, log_sum_exp
from fastqt.functional.fitting import RowNegatives, fit_padding
from fastqt.loss import Arguments, loss
from fastqt.losses.common import joined_loss, scores
from fastqt.losses.debiasing import LEAST_SCALE, Prior, debiased, fit_prior, is_debiased, log_of_count
from fastqt.losses.pair_scores import thresholds_of
from fastqt.matryoshka import MatryoshkaLike
from fastqt.negatives import Mixed
from fastqt.options import Backend, Memory, Reduction, Similarity, TargetReduction
from fastqt.problem import loss_dtype, unit_rows
from fastqt.targets import Pairs


def _fit(
    label_smoothing: float,
    exclude: Exclusions | None,
    similarity: Similarity,
    row_negatives: Tensor | Mixed | None,
    tau_plus: float | Tensor,
) -> None:
    fit_padding(exclude, row_negatives)
    if similarity == "euclidean" and is_debiased(tau_plus):
        raise ValueError("similarity: want 'dot' with tau_plus, got 'euclidean'")
    if not label_smoothing:
        return
    if exclude is not None:
        raise ValueError("exclude: want None with label_smoothing, which gives every candidate mass")
    if similarity == "euclidean":
        raise ValueError("similarity: want 'dot' with label_smoothing, got 'euclidean'")
    if row_negatives is not None:
        raise ValueError("row_negatives: want None with label_smoothing, which is of all candidates")
    if is_debiased(tau_plus):
        raise ValueError("tau_plus: want 0 with label_smoothing")


@loss("InfoNCELoss", check=(_fit, fit_prior), sums_prefixes=False)
def info_nce_loss(
    call: Arguments,
    queries: Rows,
    candidates: OwnRows,
    *,
    scale: Scale = 20.0,
    normalize: bool = True,
    negatives: OwnRows | None = None,
    row_negatives: RowNegatives = None,
    tau_plus: Prior = 0.0,
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
        row_negatives: (N, D) or (N, K, D) negatives of each query alone, as of `contrastive_loss`. Not with
            label smoothing.
        tau_plus: the share of the negatives that are expected to be positives, 0 <= tau_plus < 1, or (N,), a
            share for each query. Other than 0 it makes the loss the debiased one, which is of cosines, and
            takes a product more. Not with label smoothing.
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

    Source: van den Oord et al., "Representation learning with contrastive predictive coding" (2018); for
    `tau_plus` Chuang et al., "Debiased contrastive learning" (2020), eq. 7 and 8.
    """
    if is_debiased(tau_plus):
        return call.sum_over_prefixes(lambda dim: _debiased_loss(call, dim))
    unsmoothed = call.to(contrastive_loss, **call.embeddings, targets=Pairs(), diagonal="keep")
    if not label_smoothing:
        return unsmoothed
    columns = [candidates] if negatives is None else [candidates, negatives]

    def smoothing(dim: int | None) -> Tensor:
        return smoothing_loss(call, queries[:, :dim], [x[:, :dim] for x in columns])

    return unsmoothed + call.sum_over_prefixes(smoothing)


def _debiased_loss(call: Arguments, dim: int | None) -> Tensor:
    """The loss of the first columns in which some of the negatives are expected to be positives."""
    values, batch = call.values, call.batch
    rows = {
        name: unit_rows(x[..., :dim]) if isinstance(x, Tensor) else x for name, x in call.embeddings.items()
    }
    queries, positives = rows["queries"], rows["candidates"][: len(rows["queries"])]
    exclude = _without_margin(values["exclude"], queries, positives)

    def sums(of: Mapping[str, Any], scale: float | Tensor) -> Tensor:
        how = {"scale": scale, "normalize": False, "diagonal": "exclude", "exclude": exclude}
        return batch.part(call.to(log_sum_exp, **of, **how))

    with batch.leaving_word():
        positive, others = scores(queries, positives, values["scale"]), sums(rows, values["scale"])
        with torch.no_grad():
            if exclude is None:
                log_count = _log_count(call)
            elif exclude.of(Above) is not None:  # which compares the scores as they are
                log_count = sums(rows, LEAST_SCALE)
            else:
                of_nothing = {
                    name: x.new_zeros(*x.shape[:-1], 1) if isinstance(x, Tensor) else x
                    for name, x in rows.items()
                }
                log_count = sums(of_nothing, 1.0)
        true = debiased(positive, [others], [log_count], values["tau_plus"], values["scale"])
        losses = joined_loss(positive, [true])
    return batch.reduced(losses, _reduction(values["reduction"])).to(loss_dtype(queries))


def _log_count(call: Arguments) -> Tensor:
    """The logarithm of how many negatives each query has, (), where none of them leaves."""
    shared = [call.values[name] for name in ("candidates", "negatives")]
    alone, device = call.values["row_negatives"], call.values["queries"].device
    count = call.batch.sum_of_lengths(sum(len(x) for x in shared if x is not None), device) - 1
    if alone is not None:
        count += alone.shape[1] if isinstance(alone, Tensor) and alone.dim() == 3 else 1
    return log_of_count(count, device)


def _without_margin(exclude: Exclusions | None, queries: Tensor, positives: Tensor) -> Exclusions | None:
    """The filters with thresholds in place of a margin, for what has no targets."""
    margin = None if exclude is None else exclude.of(Margin)
    if exclude is None or margin is None:
        return exclude
    above = thresholds_of(queries, positives, margin)
    if (other := exclude.of(Above)) is not None:
        above = replace(above, thresholds=torch.fmin(above.thresholds, other.thresholds))
    others = (x for x in exclude.filters if not isinstance(x, Margin | Above))
    return Exclusions((above, *others))


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
        embeddings = [unit_rows(x) for x in embeddings]
    queries, *columns = embeddings
    leads = scores(queries, columns[0][: len(queries)] - _mean_of(columns, call.batch), values["scale"])

    return call.batch.reduced(values["label_smoothing"] * leads, _reduction(values["reduction"]))


def _reduction(reduction: TargetReduction) -> Reduction:
    """The reduction of rows that all have a target."""
    return "mean" if reduction == "mean_of_targets" else reduction


def _mean_of(columns: Sequence[Tensor], batch: Batch) -> Tensor:
    """The mean of the rows of several matrices, those of all ranks: (D,)."""
    total = sum((x.sum(0) for x in columns[1:]), columns[0].sum(0))
    return batch.sum_over_ranks(total) / batch.sum_of_lengths(sum(map(len, columns)), total.device)
