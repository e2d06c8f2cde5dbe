"""Lowers the arguments of a loss to a checked problem, and hands it to the engine that was chosen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

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
    is_traced,
)
from fastqt.engines import plans, reference
from fastqt.functional.guided import Guided, GuidedProblem, guided_problem, reference_loss
from fastqt.guide import Guide
from fastqt.negatives import Mixed, mixed_rows
from fastqt.options import Backend, Memory
from fastqt.problem import (
    DIAGONALS,
    Problem,
    check_memory,
    loss_dtype,
    unit_rows,
)
from fastqt.targets import Targets

FUNCTIONS = {
    "softmax": "fastqt.contrastive_loss",
    "sigmoid": "fastqt.sigmoid_loss",
    "log_sum_exp": "fastqt.log_sum_exp",
}


def lowered(
    queries: Tensor, candidates: Tensor, targets: Targets, **options: Any
) -> tuple[Problem, engines.Engine]:
    """The problem of the arguments of `checked` in the dtype of the engine that is chosen, and the engine."""
    p, plan = checked(queries, candidates, targets, **options)
    prepare(p, plan)
    return p, plan.engine


def checked(
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
    row_scores: Tensor | None = None,
    query_groups: Tensor | None,
    candidate_groups: Tensor | None,
    mask: Tensor | None,
    guide: Guide | None = None,
    memory: Memory,
    backend: Backend | None,
) -> tuple[Problem, plans.Plan]:
    """The checked problem with the embeddings as they were given, and how it is computed.

    Row negatives and row scores are those that `one_cell_a_row` leaves.
    """
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
        normalize=normalize,
        row_scores=row_scores,
    )
    if guide is not None:
        _check_guide(guide, p)
    if p.targets.background is not None:
        _check_smoothing(p)
    if mixed is not None:
        p.partners, p.mix = mixed.partners_of(N, M, device), mixed.mix
    if guide is None:
        return p, plan or plans.plan(kind, p, backend)
    # Its engine is one that takes a mask, of which nothing is stored.
    masked = replace(p, mask=torch.empty(1, 1, dtype=torch.bool, device=device).expand(N, M))
    return guided_problem(p, guide), plan or plans.plan(kind, masked, backend)


def prepare(p: Problem, plan: plans.Plan) -> None:
    """Turns the embeddings of a checked problem into what its engine takes."""
    engine, dtype, computed, as_given = plan
    in_copies = p.normalize and not engine.normalizes(p, computed)
    if in_copies or not as_given:
        p.queries = _prepare(p.queries, in_copies, dtype, computed)
        p.candidates = _prepare(p.candidates, in_copies, dtype, computed)
        if p.negatives is not None:
            p.negatives = _prepare(p.negatives, in_copies, dtype, computed)
        if p.row_negatives is not None:
            p.row_negatives = _prepare(p.row_negatives, in_copies, dtype, computed)
    p.normalize = p.normalize and not in_copies
    if p.partners is not None and not (engine.mixes and not isinstance(p, GuidedProblem)):
        mixed_from = unit_rows(p.candidates) if p.normalize else p.candidates
        p.row_negatives, p.partners = mixed_rows(mixed_from, p.mix, p.partners), None
    if p.targets.dense is not None and not engine.eager:
        # The kernels read a target matrix in the scores' dtype.
        p.targets = replace(p.targets, dense=p.targets.dense.to(loss_dtype(p.queries)))


def computed_loss(p: Problem, reduction: str, engine: engines.Engine) -> Tensor:
    if isinstance(p, GuidedProblem) and not engine.eager:
        computation = Guided(engines.computation(engine.name, p.unguided()), engine.name)
        return autograd.loss_of(p, reduction, computation, FUNCTIONS[p.link])
    if engine.eager:
        with torch.autocast(p.queries.device.type, enabled=False):
            if isinstance(p, GuidedProblem):
                return reference_loss(p, reduction)
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


def _check_guide(guide: object, p: Problem) -> None:
    """That a guide fits the problem."""
    if not isinstance(guide, Guide):
        raise TypeError(f"guide: want a fastqt.Guide, got {type(guide).__name__}")
    if is_traced(p.queries):
        raise ValueError("guide: want plain tensors with it, and no tracer's, which have no operator for it")
    negatives = None if p.negatives is None else len(p.negatives)
    guide.check(len(p.queries), len(p.candidates), negatives, p.queries.device)
    if p.targets.background is not None:
        raise ValueError("guide: want None with smoothed targets, which give every candidate mass")


def _check_smoothing(p: Problem) -> None:
    """That nothing excludes a cell, where every cell is a target."""
    if p.mask is not None or p.query_groups is not None:
        name = "mask" if p.mask is not None else "query_groups"
        raise ValueError(f"{name}: want None with smoothed targets, which give every candidate mass")
