"""The general losses over the ranks of a group.

Each rank has the rows of its own queries. With gathered candidates that is an ordinary problem whose
candidates are those of all ranks, between two steps that have gradients: the rows of all ranks are gathered,
and the losses of all ranks are added up. With a ring, one rank's candidates after the other are visited.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastqt import autograd, engines
from fastqt.checks import (
    as_ids,
    check_bias,
    check_embeddings,
    check_flag,
    check_option,
    check_paired,
    check_scale,
    input_dtype,
)
from fastqt.distributed import collectives
from fastqt.distributed.group import Group, GroupLike, as_group
from fastqt.distributed.ring import Ring, visiting_rows
from fastqt.distributed.shards import (
    Shards,
    agree,
    local_rows,
    numbers,
    shard_rows,
    wanting_gradients,
    with_a_row,
)
from fastqt.functional.euclidean import SIMILARITIES, Completed, check_euclidean, lower_euclidean, moments
from fastqt.functional.lowering import FUNCTIONS, checked, computed_loss, lowered, prepare
from fastqt.functional.row_scores import check_row_scores, one_cell_a_row
from fastqt.guide import Guide
from fastqt.negatives import Mixed, mixtures
from fastqt.problem import (
    DIAGONALS,
    REDUCTIONS,
    TARGET_REDUCTIONS,
    Problem,
    check_memory,
    unit_rows,
)
from fastqt.targets import NoTargets, Rolled, Targets

EMBEDDINGS = ("queries", "candidates", "negatives", "row_negatives")
PRIVATE = ("row_negatives", "row_scores")  # of each query alone
LEAVES = (*EMBEDDINGS, "row_scores", "scale", "bias")


def loss_over_group(
    group: GroupLike,
    queries: Tensor,
    candidates: Tensor,
    targets: Targets,
    reduction: str,
    options: dict[str, Any],
) -> Tensor:
    """The loss of all ranks' rows.

    Args:
        group: what the user gave.
        queries, candidates: this rank's.
        targets: of this rank's queries, over the candidates of all ranks.
        reduction: of all ranks' rows; "none" for this rank's.
        options: the other arguments of `lowered`, of this rank.

    Raises:
        ValueError, TypeError: as of the losses, or the ranks differ.
    """
    ranks, function = as_group(group), FUNCTIONS[options["link"]]
    given = {**options, "queries": queries, "candidates": candidates}
    shards = agree(ranks, function, partial(_checked, ranks, targets, reduction, given))
    ranks = shards.group
    completed = _in_products(shards, given) if given.pop("similarity", "dot") == "euclidean" else None
    targets = targets.of_shard(shard_rows(shards, "queries", "candidates"))
    local = _local_loss(shards, targets, reduction, given, function)
    local = local if completed is None else completed(local)
    if reduction != "mean_of_targets":
        return collectives.reduced(local, reduction, shards.total("queries"), ranks)
    queries = given["queries"]
    counted = torch.zeros((), dtype=torch.int64, device=queries.device)
    if len(queries):
        rows = targets.rows(len(queries), shards.total("candidates"), queries.device)
        counted = rows.rows_with_targets()
    return collectives.total(local, ranks) / collectives.add_up(counted, ranks).clamp(min=1)


def _local_loss(
    shards: Shards, targets: Targets, reduction: str, given: dict[str, Any], function: str
) -> Tensor:
    """The sum of this rank's rows, or the rows."""
    # The guide's embeddings are gathered, and so is what they are compared with.
    takes_ring = shards.group.takes_ring(shards.total("candidates"), given["candidates"])
    if takes_ring and given["guide"] is None:
        return _loss_of_ring(shards, targets, reduction, given, function)
    return _loss_of_gathered(shards, targets, reduction, given)


def _in_products(shards: Shards, given: dict[str, Any]) -> Completed:
    """Lowers Euclidean scores to products, and returns what makes the loss theirs."""

    def of_negatives(queries: Tensor, negatives: Tensor, options: dict[str, Any]) -> Tensor:
        counts = {"queries": shards.counts["queries"], "candidates": shards.counts["negatives"]}
        among = shards._replace(counts=counts)
        alone = {**options, "queries": queries, "candidates": negatives}
        return _local_loss(among, NoTargets(), "none", alone, FUNCTIONS["log_sum_exp"])

    # All ranks have to move their embeddings by the same vector, to the bit.
    queries, candidates, group = given.pop("queries"), given.pop("candidates"), shards.group
    own = moments(queries, candidates, given["negatives"])
    of_ranks = collectives.gather_constant(own[None], (1,) * group.size, group)
    queries, candidates, completed = lower_euclidean(
        queries, candidates, given, of_ranks.sum(0), of_negatives
    )
    given |= {"queries": queries, "candidates": candidates}
    return completed


def _checked(
    group: Group, targets: Targets, reduction: str, given: dict[str, Any]
) -> tuple[dict[str, int], dict[str, Hashable]]:
    """Checks what a rank can check by itself; the numbers of its rows, and what has to be the same on all.

    In `given` a DTensor is replaced by this rank's rows of it.
    """
    for name in (*EMBEDDINGS, "row_scores"):
        if isinstance(given[name], Tensor):
            given[name] = local_rows(name, given[name])
    embeddings = {name: given[name] for name in EMBEDDINGS if not isinstance(given[name], Mixed)}
    may_lack = ("negatives", "row_negatives")
    check_embeddings(may_lack, **{name: with_a_row(group, x) for name, x in embeddings.items()})
    queries, candidates = given["queries"], given["candidates"]
    check_option("diagonal", given["diagonal"], DIAGONALS)
    check_option("reduction", reduction, TARGET_REDUCTIONS if given["link"] == "softmax" else REDUCTIONS)
    check_memory(given["memory"])
    check_flag("normalize", given["normalize"])
    check_scale(given["scale"], queries.dtype)
    similarity = given.get("similarity", "dot")
    check_option("similarity", similarity, SIMILARITIES)
    if similarity == "euclidean":
        check_euclidean(queries, candidates, given)
    check_row_scores(given["row_scores"], len(queries), queries.device)
    targets.check_queries(len(queries))
    check_bias(given["bias"], len(candidates), queries.device, queries.dtype)
    if (given["query_groups"] is None) != (given["candidate_groups"] is None):
        missing = "query_groups" if given["query_groups"] is None else "candidate_groups"
        raise ValueError(f"{missing}: want it together with the other groups, got None")
    for name, rows in (("query_groups", len(queries)), ("candidate_groups", len(candidates))):
        if given[name] is not None:
            given[name] = as_ids(name, given[name]).to(queries.device)
            if given[name].numel() != rows:
                raise ValueError(f"{name}: want {rows} ids, got {given[name].numel()}")
    guide = given["guide"]
    if guide is not None:
        _check_guide(group, guide, given)
    sizes = {"queries": len(queries), "candidates": len(candidates)}
    if given["negatives"] is not None:
        sizes["negatives"] = len(given["negatives"])
    return sizes, {
        "width": queries.shape[1],
        "dtype": str(input_dtype(queries)),
        "device": queries.device.type,
        "targets": targets.kind(),
        "reduction": reduction,
        **{name: given[name] for name in ("diagonal", "normalize")},
        "similarity": similarity,
        **{f"{name} given": given[name] is not None for name in ("negatives", *PRIVATE, "mask")},
        **{f"{name} given": given[name] is not None for name in ("query_groups", "candidate_groups")},
        "guide": None if guide is None else guide.kind(),
        "bias per candidate": isinstance(given["bias"], Tensor) and given["bias"].dim() == 1,
        "requires_grad": wanting_gradients({name: given[name] for name in LEAVES}),
        **numbers(group, {name: given[name] for name in ("scale", "bias")}),
    }


def _loss_of_gathered(shards: Shards, targets: Targets, reduction: str, given: dict[str, Any]) -> Tensor:
    """The sum of this rank's rows, or the rows, from the candidates of all ranks."""
    group, queries = shards.group, given["queries"]
    options = {**given, **_gathered_columns(shards, given)}
    counts = shards.counts
    options["candidates"] = collectives.gather(
        given["candidates"], counts["candidates"], group, input_dtype(queries)
    )
    if given["negatives"] is not None:
        negatives = collectives.gather(given["negatives"], counts["negatives"], group, input_dtype(queries))
        options["negatives"] = negatives if len(negatives) else None
    if isinstance(given["row_negatives"], Mixed):
        options["row_negatives"] = _mixed(shards, given, options["candidates"].__getitem__)
    leaves = [options[name] for name in LEAVES]
    if given["guide"] is not None:
        options["guide"] = _gathered_guide(shards, given["guide"])
    if given["diagonal"] != "keep":
        targets = _with_own_candidates_first(shards, targets, options)
    if not len(queries):
        with shards.agreeing():
            return collectives.nothing(leaves, reduction)
    queries, candidates = options.pop("queries"), options.pop("candidates")
    with shards.agreeing():
        lacking = one_cell_a_row(queries, candidates, options)
        p, engine = lowered(queries, candidates, targets, **options)
        found = computed_loss(p, "none" if reduction == "none" else "sum", engine)
        return _with(lacking, found)


def _with(lacking: Tensor | None, found: Tensor) -> Tensor:
    """A loss of rows, or their sum, and what the rows' losses lack."""
    return found if lacking is None else found + (lacking if found.dim() else lacking.sum())


def _gathered_columns(shards: Shards, given: dict[str, Any]) -> dict[str, Tensor]:
    """The arguments with a number for each candidate, of all ranks."""
    counts, group, found = shards.counts["candidates"], shards.group, {}
    if given["candidate_groups"] is not None:
        found["candidate_groups"] = collectives.gather_constant(given["candidate_groups"], counts, group)
    if isinstance(given["bias"], Tensor) and given["bias"].dim():
        found["bias"] = collectives.gather(given["bias"], counts, group)
    return found


def _check_guide(group: Group, guide: object, given: dict[str, Any]) -> None:
    """Checks a rank's guide beside its embeddings."""
    if not isinstance(guide, Guide):
        raise TypeError(f"guide: want a fastqt.Guide, got {type(guide).__name__}")
    if group.exchange == "ring":
        raise ValueError("exchange: want 'auto' or 'gather' with a guide, got 'ring'")
    negatives = None if given["negatives"] is None else len(given["negatives"])
    guide.check(len(given["queries"]), len(given["candidates"]), negatives, given["queries"].device)


def _gathered_guide(shards: Shards, guide: Guide) -> Guide:
    """This rank's guide with the candidates and negatives of all ranks."""
    group, counts = shards.group, shards.counts
    candidates = collectives.gather_constant(guide.candidates, counts["candidates"], group)
    negatives = None
    if guide.negatives is not None:
        negatives = collectives.gather_constant(guide.negatives, counts["negatives"], group)
    thresholds = guide.thresholds
    if thresholds is None:
        check_paired("queries", shards.total("queries"), "guide candidates", shards.total("candidates"))
        thresholds = guide.row_thresholds(candidates[shards.first("queries") :])
    return guide.against(candidates, negatives if negatives is None or len(negatives) else None, thresholds)


def _mixed(shards: Shards, given: dict[str, Any], rows_at: Callable[[Tensor], Tensor]) -> Tensor:
    """The row negatives of `Mixed` for this rank's queries, from the batch's candidates of given indices."""
    mixed, first, n = given["row_negatives"], shards.first("queries"), len(given["queries"])
    N, M, device = shards.total("queries"), shards.total("candidates"), given["queries"].device
    if mixed.partners is None:
        partners = mixed.partners_of(N, M, device)[first : first + n]
    else:
        partners = mixed.partners_of(n, M, device)
    own = torch.arange(first, first + n, device=device)
    pair = rows_at(torch.cat([own, partners])).detach()
    if given["normalize"]:
        pair = unit_rows(pair)
    return mixtures(pair[:n], pair[n:], mixed.mix)


def _with_own_candidates_first(shards: Shards, targets: Targets, options: dict[str, Any]) -> Targets:
    """Moves the candidates before this rank's queries behind all others, and gives the targets of these.

    The batch's cells (i, i) are then the cells (i, i) of the rank's own rows.
    """
    first, N, M = shards.first("queries"), shards.total("queries"), shards.total("candidates")
    if N > M:
        raise ValueError(
            f"diagonal: want 'keep' in a group with more queries (N={N}) than candidates (M={M}), "
            f"got {options['diagonal']!r}"
        )
    if not first:
        return targets
    for name in ("candidates", "candidate_groups", "bias"):
        if isinstance(options[name], Tensor) and options[name].dim():
            options[name] = options[name].roll(-first, 0)
    if options["mask"] is not None:
        options["mask"] = options["mask"].roll(-first, 1)
    if options["guide"] is not None:
        guide = options["guide"]
        options["guide"] = guide.against(guide.candidates.roll(-first, 0), guide.negatives, guide.thresholds)
    return Rolled(targets, first)


def _loss_of_ring(
    shards: Shards, targets: Targets, reduction: str, given: dict[str, Any], function: str
) -> Tensor:
    """The sum of this rank's rows, or the rows, from one rank's candidates after the other."""
    with shards.agreeing():
        p, engine, lacking = _problem_of_ring(shards, targets, given)
    ring = Ring(shards, engines.computation(engine.name, p))
    return _with(lacking, autograd.loss_of(p, "none" if reduction == "none" else "sum", ring, function))


def _problem_of_ring(
    shards: Shards, targets: Targets, given: dict[str, Any]
) -> tuple[Problem, engines.Engine, Tensor | None]:
    """The problem that `Ring` takes, the engine of its visits, and what the rows' losses lack."""
    queries, M, counts = given["queries"], shards.total("candidates"), shards.counts
    if given["diagonal"] != "keep" and counts["queries"] != counts["candidates"]:
        raise ValueError(
            "exchange: want 'gather' where the diagonal is replaced and a rank has not as many candidates as "
            "queries, got 'ring'"
        )
    negatives = counts.get("negatives", counts["candidates"])
    if any(more and not own for more, own in zip(negatives, counts["candidates"], strict=True)):
        raise ValueError("exchange: want 'gather' where a rank has negatives but no candidates, got 'ring'")
    options = {**given, **_gathered_columns(shards, given)}
    del options["queries"], options["candidates"]
    if isinstance(given["row_negatives"], Mixed):
        options["row_negatives"] = _mixed(shards, given, partial(visiting_rows, shards, given["candidates"]))
    lacking = one_cell_a_row(queries, queries[:0], options)
    private = {name: options[name] for name in PRIVATE}
    if not len(queries):
        options |= dict.fromkeys((*PRIVATE, "mask", "query_groups", "candidate_groups"))
        targets = NoTargets()
    # Nothing is read of the candidates before they visit: for the checks and the targets their number counts.
    candidates = queries.new_empty(1, queries.shape[1]).expand(M, -1)
    options["negatives"] = with_a_row(shards.group, given["negatives"])
    p, plan = checked(with_a_row(shards.group, queries), candidates, targets, **options)
    if plan.engine.eager:
        raise ValueError("exchange: want 'gather' with backend='reference', got 'ring'")
    p.queries, p.candidates, p.negatives = queries, given["candidates"], given["negatives"]
    if not len(queries):
        p.row_negatives, p.row_scores = private.values()
    prepare(p, plan)
    return p, plan.engine, lacking
