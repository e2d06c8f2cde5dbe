"""The general losses over the ranks of a group.

Each rank has the rows of its own queries. With gathered candidates that is an ordinary problem whose
candidates are those of all ranks, between two steps that have gradients: the rows of all ranks are gathered,
and the losses of all ranks are added up. With a ring, one rank's candidates after the other are visited.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from fastqt import autograd, engines
from fastqt.checks import check_paired
from fastqt.distributed import collectives
from fastqt.distributed.group import Group, GroupLike
from fastqt.distributed.ring import Ring, visiting_rows
from fastqt.distributed.shards import (
    Shards,
    agree,
    facts_of_embeddings,
    facts_of_leaves,
    with_a_row,
)
from fastqt.functional.call import Call, Completion, checked
from fastqt.functional.euclidean import in_products, moments
from fastqt.functional.lowering import computed_loss, lowered, prepare, problem_of
from fastqt.functional.row_cells import one_cell_a_row
from fastqt.guide import Guide
from fastqt.negatives import Mixed, mixtures
from fastqt.problem import Problem, unit_rows
from fastqt.targets import NoTargets
from fastqt.torch_modes import input_dtype

LEAVES = ("queries", "candidates", "negatives", "row_negatives", "row_scores", "scale", "bias")
MAY_LACK = ("negatives", "row_negatives", "row_scores", "mask", "query_groups", "candidate_groups")


def loss_over_group(group: GroupLike, call: Call) -> Tensor:
    """The loss of all ranks' rows.

    Args:
        group: what the user gave.
        call: of this rank's queries; the targets are over the candidates of all ranks, and the reduction is
            of all ranks' rows, "none" for this rank's.

    Raises:
        ValueError, TypeError: as of the losses, or the ranks differ.
    """

    def check(ranks: Group | None) -> dict[str, int]:
        nonlocal call
        call = checked(call.local(ranks), ranks)
        call.targets.check_queries(len(call.queries))
        sizes = {"queries": len(call.queries), "candidates": len(call.candidates)}
        if call.negatives is not None:
            sizes["negatives"] = len(call.negatives)
        return sizes

    shards = agree(group, call.function, check, lambda ranks: _facts(call, ranks))
    assert isinstance(shards, Shards)
    call = replace(call, targets=shards.targets(call.targets, "queries", "candidates"))
    completion: Completion | None = None
    if call.similarity == "euclidean":
        # All ranks have to move their embeddings by the same vector, to the bit.
        own = moments(call.queries, call.candidates, call.negatives)
        of_ranks = collectives.gather_constant(own[None], (1,) * shards.group.size, shards.group)
        call, completion = in_products(call, of_ranks.sum(0), partial(_of_negatives, shards))

    local = _local_loss(shards, call)
    local = local if completion is None else completion(local)
    if call.reduction != "mean_of_targets":
        return collectives.reduced(local, call.reduction, shards.total("queries"), shards.group)
    counted = torch.zeros((), dtype=torch.int64, device=call.queries.device)
    if len(call.queries):
        rows = call.targets.rows(len(call.queries), shards.total("candidates"), call.queries.device)
        counted = rows.rows_with_targets()
    total = collectives.total(local, shards.group)
    return total / collectives.add_up(counted, shards.group).clamp(min=1)


def _facts(call: Call, ranks: Group) -> dict[str, Hashable]:
    """What has to be the same of a call on all ranks."""
    return {
        **facts_of_embeddings(call.queries),
        "targets": call.targets.kind(),
        "reduction": call.reduction,
        "diagonal": call.diagonal,
        "normalize": call.normalize,
        "similarity": call.similarity,
        **{f"{name} given": getattr(call, name) is not None for name in MAY_LACK},
        "guide": None if call.guide is None else call.guide.kind(),
        "bias per candidate": isinstance(call.bias, Tensor) and call.bias.dim() == 1,
        **facts_of_leaves(ranks, {name: getattr(call, name) for name in LEAVES}),
    }


def _of_negatives(shards: Shards, call: Call) -> Tensor:
    """The logsumexp of this rank's queries with the negatives of all ranks, the call's candidates."""
    counts = {"queries": shards.counts["queries"], "candidates": shards.counts["negatives"]}
    return _local_loss(shards.of(counts), call)


def _local_loss(shards: Shards, call: Call) -> Tensor:
    """The sum of this rank's rows, or the rows."""
    part = replace(call, reduction="none" if call.reduction == "none" else "sum")
    # The guide's embeddings are gathered, and so is what they are compared with.
    takes_ring = shards.group.takes_ring(shards.total("candidates"), call.candidates)
    if takes_ring and call.guide is None:
        return _loss_of_ring(shards, part)
    return _loss_of_gathered(shards, part)


def _loss_of_gathered(shards: Shards, call: Call) -> Tensor:
    """The sum of this rank's rows, or the rows, from the candidates of all ranks."""
    dtype = input_dtype(call.queries)
    whole = replace(
        _with_columns_of_all(shards, call), candidates=shards.gather(call.candidates, "candidates", dtype)
    )
    if call.negatives is not None:
        negatives = shards.gather(call.negatives, "negatives", dtype)
        whole.negatives = negatives if len(negatives) else None
    if isinstance(call.row_negatives, Mixed):
        whole.row_negatives = _mixed(shards, call, whole.candidates.__getitem__)
    leaves = [getattr(whole, name) for name in LEAVES]
    if call.guide is not None:
        whole.guide = _gathered_guide(shards, call.guide)
    if call.diagonal != "keep":
        whole = _with_own_candidates_first(shards, whole)

    with shards.agreeing():
        if not len(call.queries):
            return collectives.nothing(leaves, call.reduction)
        one, completion = one_cell_a_row(whole)
        p, engine = lowered(one)
        loss = computed_loss(p, call.reduction, engine)
        return loss if completion is None else completion(loss)


def _with_columns_of_all(shards: Shards, call: Call) -> Call:
    """The call with what it has for each candidate, from all ranks."""
    whole = replace(call)
    if call.candidate_groups is not None:
        whole.candidate_groups = shards.gather_constant(call.candidate_groups, "candidates")
    if isinstance(call.bias, Tensor) and call.bias.dim():
        whole.bias = shards.gather(call.bias, "candidates")
    return whole


def _gathered_guide(shards: Shards, guide: Guide) -> Guide:
    """This rank's guide with the candidates and negatives of all ranks."""
    candidates = shards.gather_constant(guide.candidates, "candidates")
    negatives = None
    if guide.negatives is not None:
        negatives = shards.gather_constant(guide.negatives, "negatives")
    thresholds = guide.thresholds
    if thresholds is None:
        check_paired("queries", shards.total("queries"), "guide candidates", shards.total("candidates"))
        thresholds = guide.row_thresholds(candidates[shards.first("queries") :])
    return guide.against(candidates, negatives if negatives is None or len(negatives) else None, thresholds)


def _mixed(shards: Shards, call: Call, rows_at: Callable[[Tensor], Tensor]) -> Tensor:
    """The row negatives of `Mixed` for this rank's queries, from the batch's candidates of some indices."""
    mixed, first, n = call.row_negatives, shards.first("queries"), len(call.queries)
    assert isinstance(mixed, Mixed)
    N, M, device = shards.total("queries"), shards.total("candidates"), call.queries.device
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
    first = shards.first("queries")
    targets = shards.own_first(call.targets, call.diagonal, "queries", "candidates")
    if not first:
        return call
    moved = replace(call, targets=targets, candidates=call.candidates.roll(-first, 0))
    if call.candidate_groups is not None:
        moved.candidate_groups = call.candidate_groups.roll(-first, 0)
    if isinstance(call.bias, Tensor) and call.bias.dim():
        moved.bias = call.bias.roll(-first, 0)
    if call.mask is not None:
        moved.mask = call.mask.roll(-first, 1)
    if call.guide is not None and call.guide.thresholds is not None:
        guide = call.guide
        moved.guide = guide.against(guide.candidates.roll(-first, 0), guide.negatives, call.guide.thresholds)
    return moved


def _loss_of_ring(shards: Shards, call: Call) -> Tensor:
    """The sum of this rank's rows, or the rows, from one rank's candidates after the other."""
    with shards.agreeing():
        p, engine, completion = _problem_of_ring(shards, call)
    ring = Ring(shards, engine.computation(p))
    loss = autograd.loss_of(p, call.reduction, ring, call.function)
    return loss if completion is None else completion(loss)


def _problem_of_ring(shards: Shards, call: Call) -> tuple[Problem, engines.Engine, Completion | None]:
    """The problem that `Ring` takes, the engine of its visits, and what the loss still lacks."""
    counts = shards.counts
    if call.diagonal != "keep" and counts["queries"] != counts["candidates"]:
        raise ValueError(
            "exchange: want 'gather' where the diagonal is replaced and a rank has not as many candidates as "
            "queries, got 'ring'"
        )
    negatives = counts.get("negatives", counts["candidates"])
    if any(more and not own for more, own in zip(negatives, counts["candidates"], strict=True)):
        raise ValueError("exchange: want 'gather' where a rank has negatives but no candidates, got 'ring'")

    whole = _with_columns_of_all(shards, call)
    if isinstance(call.row_negatives, Mixed):
        whole.row_negatives = _mixed(shards, call, partial(visiting_rows, shards, call.candidates))
    one, completion = one_cell_a_row(replace(whole, candidates=call.queries[:0]))
    private = one.row_negatives, one.row_scores

    # Nothing is read of the candidates before they visit: for the checks and the targets their number counts.
    M, ranks = shards.total("candidates"), shards.group
    stand_in = call.queries.new_empty(1, call.queries.shape[1]).expand(M, -1)
    visited = replace(
        one,
        queries=with_a_row(ranks, call.queries),
        candidates=stand_in,
        negatives=with_a_row(ranks, call.negatives),
    )
    if not len(call.queries):
        visited = replace(
            visited, targets=NoTargets(), row_negatives=None, row_scores=None, mask=None, query_groups=None
        )
    p, plan = problem_of(visited)
    if plan.engine.eager:
        raise ValueError("exchange: want 'gather' with backend='reference', got 'ring'")
    p.queries, p.candidates, p.negatives = call.queries, call.candidates, call.negatives
    if not len(call.queries):
        row_negatives, p.row_scores = private
        assert not isinstance(row_negatives, Mixed)
        p.row_negatives = row_negatives
    prepare(p, plan)
    return p, plan.engine, completion
