"""What a rank of a group has of the batch, before its call is lowered like that of one process.

Each rank has the rows of its own queries. With gathered candidates that is an ordinary problem whose
candidates are those of all ranks. With a ring, one rank's candidates after the other are visited.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from fastqt import autograd, engines
from fastqt.distributed.local import with_a_row
from fastqt.distributed.ring import Ring, visiting_rows
from fastqt.distributed.shards import Shards
from fastqt.engines import plans
from fastqt.exclusions import Guide, OfIds
from fastqt.functional.call import Call
from fastqt.functional.false_negatives import targets_of_margin, with_thresholds, with_thresholds_from
from fastqt.functional.lowering import at_norm_1, mixtures_may_be_short, prepare, problem_of
from fastqt.functional.row_cells import one_cell_a_row
from fastqt.negatives import Mixed, mixtures
from fastqt.problem import ROW_CELLS, Problem, unit_rows
from fastqt.targets import NoTargets, TargetRows
from fastqt.torch_modes import input_dtype


def takes_ring(shards: Shards, call: Call) -> bool:
    """Whether one rank's candidates after the other are visited."""
    # What filters compare is gathered.
    return shards.group.takes_ring(shards.total("candidates"), call.candidates) and not call.is_filtered


def gathered(shards: Shards, call: Call) -> Call:
    """The call of this rank's queries with the candidates and negatives of all ranks."""
    dtype = input_dtype(call.queries)
    whole = _with_columns_of_all(shards, call)
    whole.candidates = shards.gather(call.candidates, "candidates", dtype)
    if call.negatives is not None:
        negatives = shards.gather(call.negatives, "negatives", dtype)
        whole.negatives = negatives if len(negatives) else None
    if isinstance(call.row_negatives, Mixed):
        whole.row_negatives = _mixed(shards, call, whole.candidates.__getitem__)
        if whole.candidates.is_cpu and mixtures_may_be_short(whole.candidates, call.row_negatives.mix):
            whole = at_norm_1(whole)
    if call.guide is not None:
        whole.guide = _gathered_guide(shards, call.guide)
    return whole if call.diagonal == "keep" else _with_own_candidates_first(shards, whole)


def _with_columns_of_all(shards: Shards, call: Call) -> Call:
    """The call with what it has for each candidate, from all ranks, but for the candidates themselves."""

    def of_all(ids: OfIds) -> OfIds:
        return ids.with_columns(
            partial(shards.gather_constant, of="candidates"), partial(shards.gather_constant, of="negatives")
        )

    return call.with_columns(partial(shards.gather, of="candidates"), of_all)


def _gathered_guide(shards: Shards, guide: Guide) -> Guide:
    """This rank's guide with the candidates and negatives of all ranks."""
    candidates = shards.gather_constant(guide.candidates, "candidates")
    negatives = None
    if guide.negatives is not None:
        negatives = shards.gather_constant(guide.negatives, "negatives")
    thresholds = guide.thresholds
    if thresholds is None:
        guide.check_pairs(shards.total("rows"), shards.total("candidates"))
        thresholds = guide.row_thresholds(candidates[shards.first("rows") :])
    return guide.against(candidates, negatives if negatives is None or len(negatives) else None, thresholds)


def _mixed(shards: Shards, call: Call, rows_at: Callable[[Tensor], Tensor]) -> Tensor:
    """The row negatives of `Mixed` for this rank's queries, from the batch's candidates of some indices."""
    mixed, first, n = call.row_negatives, shards.first("rows"), len(call.queries)
    assert isinstance(mixed, Mixed)
    N, M, device = shards.total("rows"), shards.total("candidates"), call.queries.device
    if mixed.partners is None:
        partners = mixed.partners_of(N, M, device)[first : first + n]
    else:
        partners = mixed.partners_of(n, M, device)
    own = torch.arange(first, first + n, device=device)
    pair = rows_at(torch.cat([own, partners])).detach()
    if call.normalize:
        pair = unit_rows(pair)
    return mixtures(pair[:n], pair[n:], mixed.mix)


def _with_own_candidates_first(shards: Shards, call: Call) -> Call:
    """Moves the candidates before this rank's queries behind all others, and with them their targets.

    The batch's cells (i, i) are then the cells (i, i) of the rank's own rows.
    """
    first = shards.first("rows")
    targets = shards.own_first(call.targets, call.diagonal, "rows", "candidates")
    if not first:
        return call

    def rolled(x: Tensor) -> Tensor:
        return x.roll(-first, 0)

    moved = call.with_columns(rolled, lambda ids: ids.with_columns(rolled, lambda negatives: negatives))
    moved.targets, moved.candidates = targets, rolled(call.candidates)
    if call.mask is not None:
        moved.mask = call.mask.roll(-first, 1)
    if call.guide is not None and call.guide.thresholds is not None:
        guide = call.guide
        moved.guide = guide.against(guide.candidates.roll(-first, 0), guide.negatives, call.guide.thresholds)
    return moved


def loss_of_ring(shards: Shards, call: Call) -> tuple[Tensor, TargetRows]:
    """The loss of this rank's rows from one rank's candidates after the other, and the rows' targets."""
    call = _with_thresholds(shards, call)
    with shards.agreeing():
        _check_ring(shards, call)
        whole = _with_columns_of_all(shards, call)
        if isinstance(call.row_negatives, Mixed):
            whole.row_negatives = _mixed(shards, call, partial(visiting_rows, shards, call.candidates))
        # No candidate is read before it visits.
        one, completion = one_cell_a_row(replace(whole, candidates=call.queries[:0]))
        p, engine = _problem_of_ring(shards, call, one)

    ring = Ring(shards, engine.computation(p))
    loss = autograd.loss_of(p, call.reduction, ring, call.function)
    return loss if completion is None else completion(loss), p.targets


def _with_thresholds(shards: Shards, call: Call) -> Call:
    """The call with the thresholds of this rank's rows, whose targets are on all ranks."""
    if call.margin is None:
        return with_thresholds(call)
    M = shards.total("candidates")
    with shards.agreeing():
        targets = targets_of_margin(call, M)
    columns = targets.compressed()[1].clamp(0, M - 1)
    return with_thresholds_from(call, targets, visiting_rows(shards, call.candidates, columns))


def _check_ring(shards: Shards, call: Call) -> None:
    counts = shards.counts
    if call.diagonal != "keep" and counts["rows"] != counts["candidates"]:
        raise ValueError(
            "exchange: want 'gather' where the diagonal is replaced and a rank has not as many candidates as "
            "queries, got 'ring'"
        )
    negatives = counts.get("negatives", counts["candidates"])
    if any(more and not own for more, own in zip(negatives, counts["candidates"], strict=True)):
        raise ValueError("exchange: want 'gather' where a rank has negatives but no candidates, got 'ring'")


def _problem_of_ring(shards: Shards, call: Call, one: Call) -> tuple[Problem, engines.Engine]:
    """The problem that `Ring` takes, and the engine of its visits.

    Args:
        shards: how candidates and negatives lie on the ranks.
        call: of this rank.
        one: the same with at most one cell that a row has alone.
    """
    # For the checks and the targets the number of the candidates counts, and a rank may have no rows.
    M, ranks = shards.total("candidates"), shards.group
    stand_in = call.queries.new_empty(1, call.queries.shape[1]).expand(M, -1)
    visited = replace(
        one,
        queries=with_a_row(ranks, call.queries),
        candidates=stand_in,
        negatives=with_a_row(ranks, call.negatives),
    )
    if not len(call.queries):
        visited.targets, visited.ids = NoTargets(), ()
        for name in (*ROW_CELLS, "mask", "thresholds"):
            setattr(visited, name, None)

    p, plan = problem_of(visited)
    if p.link != "sigmoid" and not (plan.engine.takes_columns or plan.engine.eager):
        plan = plans.plan(None, p, "torch")  # The kernels know no other columns of a row than their own.
    if plan.engine.eager:
        raise ValueError("exchange: want 'gather' with backend='reference', got 'ring'")
    p.queries, p.candidates, p.negatives = call.queries, call.candidates, call.negatives
    for name in ROW_CELLS:
        setattr(p, name, getattr(one, name))
    prepare(p, plan)
    return p, plan.engine
