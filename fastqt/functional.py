"""The public losses: check what came, choose a backend, reduce."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fastqt import autograd, backends, reference
from fastqt.checks import check_embeddings, check_groups, check_mask, check_option, check_scale, input_dtype
from fastqt.negatives import Mixed, mixed_rows
from fastqt.problem import DIAGONALS, Problem
from fastqt.targets import Targets, TargetsLike, Window, as_targets

REDUCTIONS = ("mean", "sum", "none")
MEMORY_MODES = ("fast", "low")


def contrastive_loss(
    queries: Tensor,
    candidates: Tensor,
    targets: TargetsLike | None = None,
    *,
    context_size: int = 1,
    document_ids: Tensor | None = None,
    diagonal: str = "zero",
    scale: float | Tensor = 1.0,
    normalize: bool = False,
    negatives: Tensor | None = None,
    row_negatives: Tensor | Mixed | None = None,
    query_groups: Tensor | None = None,
    candidate_groups: Tensor | None = None,
    mask: Tensor | None = None,
    reduction: str = "mean",
    memory: str = "fast",
    backend: str | None = None,
) -> Tensor:
    """Kullback-Leibler divergence from the targets to the softmax of each query's scores.

    With scores S = scale * queries @ candidates.T and P the softmax of a row of S, the loss of
    row i is sum_j T_ij (log T_ij - log P_ij): cross-entropy less the targets' entropy. A row
    without targets has loss 0. Gradients flow to `queries`, `candidates`, `negatives`,
    `row_negatives` and `scale`, once (a double backward needs backend="reference").

    Args:
        queries: (N, D) floating point. float16 and bfloat16 are computed in float32; so is what
            autocast makes of the inputs.
        candidates: (M, D), dtype and device as `queries`.
        targets: fastqt targets (`Window`, `Diagonal`, `Sparse`, `smoothed`), a (N,) integer tensor of
            target columns (-100: none), or an (N, M) matrix of weights >= 0. By default
            `Window(context_size, document_ids=document_ids)`: each sentence's neighbours.
        context_size: half-width of the default window, 1 <= context_size < N.
        document_ids: (N,) integers; the default window stays within equal ids.
        diagonal: what becomes of cells (i, i). "zero": the score is replaced by 0, so that exp(0) = 1
            stays in the denominator and no gradient passes; "exclude": they leave the softmax;
            "keep": they are candidates like all others.
        scale: inverse temperature, a finite number or 0-d tensor (differentiable).
        normalize: score by cosine: rows of all embeddings are L2-normalised first (differentiably).
        negatives: (K, D) further candidates for all rows, nobody's target.
        row_negatives: (N, D) one private negative for each row, or `Mixed(...)` from the candidates.
        query_groups: (N,) integers, with
        candidate_groups: (M,) integers: cells of equal groups leave the softmax unless they are targets.
        mask: (N, M) bool, True leaves the softmax. O(N * M) memory of the caller's; it is not copied.
        reduction: "mean" over all N rows, "sum", or "none".
        memory: "fast" keeps a chunk of whole rows of scores (about 48 MiB on a CPU) and needs three
            matrix products; "low" needs four, and tiles of fixed size whatever N and M.
        backend: "cpu", "triton" or "reference"; by default the best that works here (see `show_config`).
            The environment variable FASTQT_BACKEND sets another default.

    Returns:
        A scalar, or (N,) for reduction="none"; float64 for float64 inputs, float32 otherwise.
        NaN and inf in the embeddings reach the loss, as in torch.

    Raises:
        ValueError, TypeError: naming the argument, what is wanted and what came.

    Source: Logeswaran and Lee, "An efficient framework for learning sentence representations" (2018),
    eq. 2, with the KL form of its re-implementations; InfoNCE (van den Oord et al., 2018) is
    `targets=Diagonal(), diagonal="keep"`.
    """
    given_rows = None if isinstance(row_negatives, Mixed) else row_negatives
    check_embeddings(queries=queries, candidates=candidates, negatives=negatives, row_negatives=given_rows)
    check_option("diagonal", diagonal, DIAGONALS)
    check_option("reduction", reduction, REDUCTIONS)
    check_option("memory", memory, MEMORY_MODES)
    N, M, device = queries.shape[0], candidates.shape[0], queries.device
    operator = _targets(targets, context_size, document_ids)
    operator.check(N, M, diagonal)
    query_groups, candidate_groups = check_groups(query_groups, candidate_groups, N, M, device)
    check_mask(mask, N, M, device)
    check_scale(scale)
    chosen = backends.select(backend, device, input_dtype(queries))
    native = backends.BACKENDS[chosen]

    problem = Problem(
        queries=_prepare(queries, normalize, native),
        candidates=_prepare(candidates, normalize, native),
        negatives=None if negatives is None else _prepare(negatives, normalize, native),
        row_negatives=None if given_rows is None else _prepare(given_rows, normalize, native),
        scale=scale,
        targets=operator.rows(N, M, device),
        diagonal=diagonal,
        query_groups=query_groups,
        candidate_groups=candidate_groups,
        mask=mask,
        memory=memory,
    )
    if isinstance(row_negatives, Mixed):
        problem = _with_mixed(problem, row_negatives, written=chosen != "triton")
    _check_smoothing(problem)
    if chosen == "reference":
        with torch.autocast(device.type, enabled=False):
            return reference.contrastive_loss(problem, reduction)
    return autograd.contrastive_loss(problem, reduction, chosen)


def _targets(targets: TargetsLike | None, context_size: int, document_ids: Tensor | None) -> Targets:
    if targets is None:
        return Window(context_size, document_ids=document_ids)
    if document_ids is not None:
        raise ValueError("document_ids: want them in Window(..., document_ids=...) when targets are given")
    return as_targets(targets)


def _prepare(x: Tensor, normalize: bool, native: tuple[torch.dtype, ...]) -> Tensor:
    """Embeddings as the loss is computed on them: in float32 where the backend takes no such dtype."""
    dtype = input_dtype(x)
    x = x if dtype is x.dtype else x.to(dtype)
    if dtype not in native:
        x = x.float()
    if not normalize:
        return x
    return F.normalize(x.to(torch.promote_types(dtype, torch.float32)), dim=1).to(x.dtype)


def _with_mixed(p: Problem, mixed: Mixed, *, written: bool) -> Problem:
    partners = mixed.partners_of(p.queries.shape[0], p.candidates.shape[0], p.queries.device)
    if written:
        return replace(p, row_negatives=mixed_rows(p.candidates, mixed.mix, partners))
    return replace(p, partners=partners, mix=mixed.mix)


def _check_smoothing(p: Problem) -> None:
    if p.targets.background is not None and (p.mask is not None or p.query_groups is not None):
        name = "mask" if p.mask is not None else "query_groups"
        raise ValueError(f"{name}: want None with smoothed targets, which give every candidate mass")
