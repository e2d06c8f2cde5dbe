"""The general losses and the logsumexp: check the arguments, lower them to a problem, choose an engine."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fastqt import autograd, engines
from fastqt.checks import (
    check_bias,
    check_embeddings,
    check_flag,
    check_groups,
    check_mask,
    check_option,
    check_scale,
)
from fastqt.engines import plans, reference
from fastqt.negatives import Mixed, mixed_rows
from fastqt.problem import (
    DIAGONALS,
    REDUCTIONS,
    TARGET_REDUCTIONS,
    Problem,
    check_memory,
    loss_dtype,
    unit_rows,
)
from fastqt.targets import NoTargets, Targets, TargetsLike, given_or_window

FUNCTIONS = {
    "softmax": "fastqt.contrastive_loss",
    "sigmoid": "fastqt.sigmoid_loss",
    "log_sum_exp": "fastqt.log_sum_exp",
}


def contrastive_loss(
    queries: Tensor,
    candidates: Tensor,
    targets: TargetsLike | None = None,
    *,
    context_size: int | None = None,
    document_ids: Tensor | None = None,
    diagonal: str = "zero",
    scale: float | Tensor = 1.0,
    bias: float | Tensor = 0.0,
    normalize: bool = False,
    negatives: Tensor | None = None,
    row_negatives: Tensor | Mixed | None = None,
    query_groups: Tensor | None = None,
    candidate_groups: Tensor | None = None,
    mask: Tensor | None = None,
    reduction: str = "mean",
    memory: str | int = "fast",
    backend: str | None = None,
) -> Tensor:
    """Kullback-Leibler divergence from the targets to the softmax of each query's scores.

    With scores S = scale * queries @ candidates.T + bias and P the softmax of a row of S, the loss of
    row i is sum_j T_ij (log T_ij - log P_ij): cross-entropy less the targets' entropy. A row
    without targets has loss 0. Gradients flow to `queries`, `candidates`, `negatives`,
    `row_negatives`, `scale` and `bias`, once (a double backward needs backend="reference").

    Args:
        queries: (N, D) floating point. On a CPU float16 is computed in float32, and so is bfloat16 where
            the CPU has no instructions for products of it, or with an (N, M) matrix of targets. Elsewhere
            bfloat16 is multiplied as it is: scores are rounded to it, but those of targets are not.
        candidates: (M, D), dtype and device as `queries`.
        targets: fastqt targets (`Window`, `Diagonal`, `Sparse`, `smoothed`), a (N,) integer tensor of
            target columns (-100: none), or an (N, M) matrix of weights >= 0. By default
            `Window(context_size, document_ids=document_ids)`: each sentence's neighbours.
        context_size: half-width of the default window, 1 <= context_size < N; 1 if None.
        document_ids: (N,) integers; the default window stays within equal ids.
        diagonal: what becomes of cells (i, i). "zero": the score is replaced by 0, so that exp(0) = 1
            stays in the denominator and no gradient passes; "exclude": they leave the softmax;
            "keep": they are candidates like all others.
        scale: inverse temperature 1 / tau > 0, a number or 0-d tensor (differentiable).
        bias: added to the candidates' scores: a finite number, or a tensor () or (M,) (differentiable).
        normalize: score by cosine: the rows of all embeddings are first scaled to norm 1 (differentiable).
        negatives: (K, D) further candidates for all rows, which are targets of none.
        row_negatives: (N, D) one negative for each row alone, or `Mixed(...)` from the candidates.
        query_groups, candidate_groups: (N,) and (M,) integers. A candidate of the query's own group leaves
            the softmax, unless it is a target.
        mask: (N, M) bool; where it is True, the candidate leaves the softmax. It is read in place.
        reduction: "mean" over all N rows, those without targets included, where `F.cross_entropy` divides by
            the number of rows that have a label; "mean_of_targets": over the rows that have targets, as
            there; "sum", or "none".
        memory: "fast" holds a chunk of whole rows of scores (about 48 MiB on a CPU; on a GPU 1/85 of its
            memory, but at least 512 MiB) and takes three matrix products; "low" holds 16 MiB on a CPU, and
            40 MiB on a GPU, where a softmax takes four products, as on a CPU with rows of over 65,536 scores.
            An integer, at least 2**24, is about how many bytes the loss may take beside inputs and gradients;
            it takes three products if these are enough for that.
        backend: "cpu", "cuda" (small problems), "triton" or "reference"; by default the best that works here
            (see `show_config`). The environment variable FASTQT_BACKEND sets another default.

    Returns:
        A scalar, or (N,) for reduction="none"; float64 for float64 inputs, float32 otherwise.
        NaN and inf in the embeddings reach the loss, as in torch.

    Raises:
        ValueError, TypeError: naming the argument, what is wanted and what came.

    Source: Logeswaran and Lee, "An efficient framework for learning sentence representations" (2018),
    eq. 2, with the KL form of its re-implementations; InfoNCE (van den Oord et al., 2018) is
    `targets=Diagonal(), diagonal="keep"`.
    """
    p, engine = _lowered(
        queries,
        candidates,
        given_or_window(targets, context_size, document_ids),
        link="softmax",
        bias=bias,
        diagonal=diagonal,
        scale=scale,
        normalize=normalize,
        negatives=negatives,
        row_negatives=row_negatives,
        query_groups=query_groups,
        candidate_groups=candidate_groups,
        mask=mask,
        memory=memory,
        backend=backend,
    )
    check_option("reduction", reduction, TARGET_REDUCTIONS)
    if reduction == "mean_of_targets":
        return _loss(p, "sum", engine) / p.targets.rows_with_targets().clamp(min=1)
    return _loss(p, reduction, engine)


def sigmoid_loss(
    queries: Tensor,
    candidates: Tensor,
    targets: TargetsLike | None = None,
    *,
    context_size: int | None = None,
    document_ids: Tensor | None = None,
    diagonal: str = "keep",
    scale: float | Tensor = 1.0,
    bias: float | Tensor = 0.0,
    normalize: bool = False,
    negatives: Tensor | None = None,
    row_negatives: Tensor | Mixed | None = None,
    query_groups: Tensor | None = None,
    candidate_groups: Tensor | None = None,
    mask: Tensor | None = None,
    reduction: str = "mean",
    memory: str | int = "fast",
    backend: str | None = None,
) -> Tensor:
    """Binary cross-entropy of every query with every candidate: is this one of its targets?

    With scores S = scale * queries @ candidates.T + bias, the loss of row i is
    sum_j log(1 + exp(S_ij)) - T_ij S_ij, summed over candidates. Gradients flow to `queries`,
    `candidates`, `negatives`, `row_negatives`, `scale` and `bias`, once (a double backward needs
    backend="reference").

    Args:
        queries, candidates: as of `contrastive_loss`.
        targets: as of `contrastive_loss`; probabilities, if the loss is to be a cross-entropy. By default
            `Window(context_size, document_ids=document_ids, normalize=False)`: each sentence's neighbours.
        diagonal: "keep"; "zero": the scores of cells (i, i) are replaced by 0, which adds log 2;
            "exclude": these cells leave the loss.
        memory: as of `contrastive_loss`, but "low" needs three matrix products as well, on a GPU where the
            float32 sums of the candidates' gradients fit.
        context_size, document_ids, scale, bias, normalize, negatives, row_negatives, query_groups,
            candidate_groups, mask, reduction, backend: as of `contrastive_loss`.

    Returns:
        A scalar, or (N,) for reduction="none"; float64 for float64 inputs, float32 otherwise.

    Raises:
        ValueError, TypeError: naming the argument, what is wanted and what came.

    Source: the binary windows that Logeswaran and Lee (2018) compare QuickThoughts with; Zhai et
    al., "Sigmoid loss for language image pre-training" (2023).
    """
    p, engine = _lowered(
        queries,
        candidates,
        given_or_window(targets, context_size, document_ids, normalize=False),
        link="sigmoid",
        bias=bias,
        diagonal=diagonal,
        scale=scale,
        normalize=normalize,
        negatives=negatives,
        row_negatives=row_negatives,
        query_groups=query_groups,
        candidate_groups=candidate_groups,
        mask=mask,
        memory=memory,
        backend=backend,
    )
    check_option("reduction", reduction, REDUCTIONS)
    return _loss(p, reduction, engine)


def log_sum_exp(
    queries: Tensor,
    candidates: Tensor,
    *,
    diagonal: str = "keep",
    scale: float | Tensor = 1.0,
    bias: float | Tensor = 0.0,
    normalize: bool = False,
    negatives: Tensor | None = None,
    row_negatives: Tensor | Mixed | None = None,
    query_groups: Tensor | None = None,
    candidate_groups: Tensor | None = None,
    mask: Tensor | None = None,
    memory: str | int = "fast",
    backend: str | None = None,
) -> Tensor:
    """log sum_j exp(S_ij) of each query's scores: the logarithm of its softmax's denominator.

    With scores S = scale * queries @ candidates.T + bias. Losses over several sets of candidates are made
    from it. Leave the positives out and add them once: for positives on the diagonal with the scores
    `positive` (N,) and two sets of candidates,

        a = fastqt.log_sum_exp(queries, first, diagonal="exclude")
        b = fastqt.log_sum_exp(queries, second)
        loss = torch.nn.functional.softplus(torch.logaddexp(a, b) - positive).mean()

    is the cross-entropy over both sets together. It keeps all its digits once the positives are learnt,
    when a logsumexp that contains the positive cancels against it. Gradients flow to `queries`,
    `candidates`, `negatives`, `row_negatives`, `scale` and `bias`, once (a double backward needs
    backend="reference").

    Args:
        queries: (N, D) floating point.
        candidates: (M, D), dtype and device as `queries`.
        diagonal: what becomes of cells (i, i): "keep"; "zero": the score is replaced by 0; "exclude": they
            leave the sum.
        scale, bias, normalize, negatives, row_negatives, query_groups, candidate_groups, mask, backend: as
            of `contrastive_loss`. Positives that are not on the diagonal leave the sum by groups.
        memory: as of `contrastive_loss`. On a CPU both modes work in tiles of fixed size: one matrix product
            in the forward pass, three in the backward pass.

    Returns:
        (N,), float64 for float64 inputs, float32 otherwise. A row of which every candidate is excluded
        has -inf, and a gradient of 0.

    Raises:
        ValueError, TypeError: naming the argument, what is wanted and what came.

    Source: the denominator of Logeswaran and Lee, "An efficient framework for learning sentence
    representations" (2018), eq. 2.
    """
    p, engine = _lowered(
        queries,
        candidates,
        NoTargets(),
        link="log_sum_exp",
        bias=bias,
        diagonal=diagonal,
        scale=scale,
        normalize=normalize,
        negatives=negatives,
        row_negatives=row_negatives,
        query_groups=query_groups,
        candidate_groups=candidate_groups,
        mask=mask,
        memory=memory,
        backend=backend,
    )
    return _loss(p, "none", engine)


def _lowered(
    queries: Tensor,
    candidates: Tensor,
    targets: Targets,
    *,
    link: str,
    diagonal: str,
    scale: float | Tensor,
    bias: float | Tensor,
    normalize: bool,
    negatives: Tensor | None,
    row_negatives: Tensor | Mixed | None,
    query_groups: Tensor | None,
    candidate_groups: Tensor | None,
    mask: Tensor | None,
    memory: str | int,
    backend: str | None,
) -> tuple[Problem, engines.Engine]:
    """The checked problem in the dtype of the engine that the registry chooses, and that engine."""
    mixed, given_rows = (row_negatives, None) if isinstance(row_negatives, Mixed) else (None, row_negatives)
    two = negatives is None and given_rows is None
    kind = plans.kind_of(Problem, queries, candidates, backend) if two else None
    plan = plans.known.get(kind)
    if plan is None:
        check_embeddings(
            ("negatives", "row_negatives"),
            queries=queries,
            candidates=candidates,
            negatives=negatives,
            row_negatives=given_rows,
        )
    check_option("diagonal", diagonal, DIAGONALS)
    check_memory(memory)
    check_flag("normalize", normalize)
    N, M, device = queries.shape[0], candidates.shape[0], queries.device
    targets.check(N, M, diagonal)
    if query_groups is not None or candidate_groups is not None:
        query_groups, candidate_groups = check_groups(query_groups, candidate_groups, N, M, device)
    if mask is not None:
        check_mask(mask, N, M, device)
    check_scale(scale, queries.dtype)
    p = Problem(
        queries,
        candidates,
        negatives,
        given_rows,
        scale,
        targets=targets.rows(N, M, device),
        diagonal=diagonal,
        query_groups=query_groups,
        candidate_groups=candidate_groups,
        mask=mask,
        memory=memory,
        bias=_biases(bias, M, queries),
        link=link,
    )
    if p.targets.background is not None:
        _check_smoothing(p)
    if mixed is not None:
        p.partners, p.mix = mixed.partners_of(N, M, device), mixed.mix
    engine, dtype, computed, as_given = plan or plans.plan(kind, p, backend)
    in_copies = normalize and not engine.normalizes(p, computed)
    p.normalize = normalize and not in_copies
    if in_copies or not as_given:
        p.queries = _prepare(queries, in_copies, dtype, computed)
        p.candidates = _prepare(candidates, in_copies, dtype, computed)
        if negatives is not None:
            p.negatives = _prepare(negatives, in_copies, dtype, computed)
        if given_rows is not None:
            p.row_negatives = _prepare(given_rows, in_copies, dtype, computed)
    if p.partners is not None and not engine.mixes:
        mixed_from = unit_rows(p.candidates) if p.normalize else p.candidates
        p.row_negatives, p.partners = mixed_rows(mixed_from, p.mix, p.partners), None
    if p.targets.dense is not None and not engine.eager:
        # The kernels read a target matrix in the scores' dtype.
        p.targets = replace(p.targets, dense=p.targets.dense.to(loss_dtype(p.queries)))
    return p, engine


def _loss(p: Problem, reduction: str, engine: engines.Engine) -> Tensor:
    if engine.eager:
        with torch.autocast(p.queries.device.type, enabled=False):
            return reference.contrastive_loss(p, reduction)
    return autograd.loss_of(p, reduction, engine.name, FUNCTIONS[p.link])


def _biases(bias: float | Tensor, M: int, queries: Tensor) -> Tensor | None:
    """A checked bias for each candidate, in the scores' dtype."""
    if type(bias) is float and bias == 0:
        return None
    check_bias(bias, M, queries.device, queries.dtype)
    if not isinstance(bias, Tensor) and bias == 0:
        return None
    dtype = loss_dtype(queries)
    if isinstance(bias, Tensor):
        return bias.to(dtype).expand(M).contiguous()
    return torch.full((M,), bias, dtype=dtype, device=queries.device)


def _prepare(x: Tensor, normalize: bool, dtype: torch.dtype, computed: torch.dtype) -> Tensor:
    """Embeddings, rounded to the inputs' dtype as a matrix product would do, in that of the computation."""
    x = x if x.dtype is dtype else x.to(dtype)
    x = x if dtype is computed else x.to(computed)
    return unit_rows(x) if normalize else x


def _check_smoothing(p: Problem) -> None:
    """That nothing excludes a cell, where every cell is a target."""
    if p.mask is not None or p.query_groups is not None:
        name = "mask" if p.mask is not None else "query_groups"
        raise ValueError(f"{name}: want None with smoothed targets, which give every candidate mass")
