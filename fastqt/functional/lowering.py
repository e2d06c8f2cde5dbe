"""Lowers the arguments of a loss to a checked problem, and hands it to the engine that was chosen."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

import torch
from torch import Tensor

from fastqt import autograd, engines
from fastqt.checks import check_mask
from fastqt.engines import plans
from fastqt.engines.filtered import Filtered, FilteredProblem, filtered_problem, reference_loss
from fastqt.engines.reference import contrastive as reference
from fastqt.functional.call import FUNCTIONS, Call
from fastqt.functional.false_negatives import widened
from fastqt.negatives import Mixed, mixed_rows
from fastqt.norms import LEAST_NORM
from fastqt.problem import Problem, loss_dtype, unit_rows
from fastqt.torch_modes import is_traced, is_transformed, without_autocast

LEAST_SHARE = 1e-3  # by which those of two candidates differ where their mixture is surely no sum near 0


def lowered(call: Call, kind: Hashable | None = None) -> tuple[Problem, engines.Engine]:
    """The problem of a checked call in the dtype of the engine that is chosen, and the engine.

    Args:
        call: with the candidates of the whole batch, and at most one cell that a row has alone.
        kind: under which its plan is kept.
    """
    p, plan = problem_of(call, kind)
    prepare(p, plan)
    return p, plan.engine


def kind_of(call: Call, shapes: Hashable | None = None) -> Hashable | None:
    """What tells the plan of a call from others, if one may be kept; shapes are as of `Known`."""
    if call.negatives is not None or call.given_row_negatives is not None:
        return None
    if call.matryoshka is not None:  # which not every engine takes
        return None
    return plans.kind_of(Problem, call.queries, call.candidates, call.backend, shapes)


def problem_of(call: Call, kind: Hashable | None = None) -> tuple[Problem, plans.Plan]:
    """The problem with the embeddings as they are in the call, and how it is computed.

    Args:
        call, kind: as of `lowered`.
    """
    N, M, device = call.queries.shape[0], call.candidates.shape[0], call.queries.device
    call.targets.check(N, M, call.diagonal)
    if call.mask is not None:
        check_mask("exclude", call.mask, N, M, device)
    groups = call.groups if call.ids else None
    p = Problem(
        call.queries,
        call.candidates,
        call.negatives,
        call.given_row_negatives,
        call.scale,
        targets=call.targets.rows(N, M, device),
        diagonal=call.diagonal,
        query_groups=None if groups is None else groups.query_ids,
        candidate_groups=None if groups is None else groups.candidate_ids,
        mask=call.mask,
        memory=call.memory,
        bias=_biases(call.bias, M, call.queries),
        link=call.link,
        normalize=call.normalize,
        row_scores=call.row_scores,
        thresholds=call.thresholds,
    )
    if p.targets.background is not None:
        _check_smoothing(call)
    if (prefixes := call.matryoshka) is not None:
        # Numbers of an object are variables to torch.compile, which fails where two losses read them.
        p.prefix_dims, p.prefix_weights = prefixes.dims, tuple(map(float, prefixes.weights))
    if isinstance(call.row_negatives, Mixed):
        p.partners, p.mix = call.row_negatives.partners_of(N, M, device), call.row_negatives.mix

    plan = plans.kept(kind)
    if not call.is_filtered:
        return p, plan or plans.plan(kind, p, call.backend)
    # Its engine is one that takes a mask, of which nothing is stored.
    masked = replace(p, mask=torch.empty(1, 1, dtype=torch.bool, device=device).expand(N, M))
    filtered = filtered_problem(p, call.guide, () if groups is not None else call.ids)
    return filtered, plan or plans.plan(kind, masked, call.backend)


def prepare(p: Problem, plan: plans.Plan) -> None:
    """Turns the embeddings of a checked problem into what its engine takes."""
    engine, dtype, computed, as_given = plan
    mixes = engine.mixes and not isinstance(p, FilteredProblem)
    in_copies = p.normalize and not engine.normalizes(p, computed)
    if p.normalize and p.partners is not None and not mixes:
        # The engine would bring mixtures to norm 1 that are at the norm they are to have.
        in_copies = in_copies or mixtures_may_be_short(p.candidates, p.mix)
    if in_copies or not as_given:
        p.queries = _prepare(p.queries, in_copies, dtype, computed)
        p.candidates = _prepare(p.candidates, in_copies, dtype, computed)
        if p.negatives is not None:
            p.negatives = _prepare(p.negatives, in_copies, dtype, computed)
        if p.row_negatives is not None:
            p.row_negatives = _prepare(p.row_negatives, in_copies, dtype, computed)
    p.normalize = p.normalize and not in_copies
    if p.thresholds is not None and computed.itemsize == 2 and (in_copies or engine.name == "cpu"):
        p.thresholds = widened(p.thresholds, computed, rounds_rows=in_copies)

    if p.partners is not None and not mixes:
        mixed_from = unit_rows(p.candidates) if p.normalize else p.candidates
        p.row_negatives, p.partners = mixed_rows(mixed_from, p.mix, p.partners), None
    if p.targets.dense is not None and not engine.eager:
        # The kernels read a target matrix in the scores' dtype.
        p.targets = replace(p.targets, dense=p.targets.dense.to(loss_dtype(p.queries)))


def mixtures_may_be_short(candidates: Tensor, mix: float) -> bool:
    """Whether mixtures of candidates at norm 1 may be shorter than the least norm that they are divided by.

    Their norms are then less than 1. Candidates that cannot be read without a wait may be short.
    """
    if not candidates.is_cpu or is_traced(candidates) or is_transformed():
        return True
    # Mixtures of rows that point against each other have the norm |2 mix - 1| at least.
    if abs(2 * mix - 1) < LEAST_SHARE:
        return True
    norms = torch.linalg.vector_norm(candidates.detach(), dim=1, dtype=loss_dtype(candidates))
    return bool((norms < LEAST_NORM).any())


def at_norm_1(call: Call) -> Call:
    """The call with normalised rows, but for its row negatives, which are mixtures already."""
    if not call.normalize:
        return call
    changed = replace(call, normalize=False)
    for name in ("queries", "candidates", "negatives", "row_negatives"):
        x = getattr(call, name)
        if x is not None:
            x = x.to(loss_dtype(x))
            setattr(changed, name, x if name == "row_negatives" else unit_rows(x))
    return changed


def computed_loss(p: Problem, reduction: str, engine: engines.Engine) -> Tensor:
    if isinstance(p, FilteredProblem) and not engine.eager:
        filtered = Filtered(engine.computation(p.unfiltered()))
        return autograd.loss_of(p, reduction, filtered, FUNCTIONS[p.link], scaled_by=engine)
    if engine.eager:
        with without_autocast(p.queries):
            if isinstance(p, FilteredProblem):
                return reference_loss(p, reduction)
            return reference.contrastive_loss(p, reduction)
    return autograd.loss_of(p, reduction, engine, FUNCTIONS[p.link])


def _biases(bias: float | Tensor, M: int, queries: Tensor) -> Tensor | None:
    """A bias for each candidate, in the scores' dtype."""
    if type(bias) is float and bias == 0:
        return None
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


def _check_smoothing(call: Call) -> None:
    """That nothing excludes a cell, where every cell is a target."""
    if call.mask is not None or call.guide is not None or call.ids:
        raise ValueError("exclude: want None with smoothed targets, which give every candidate mass")
