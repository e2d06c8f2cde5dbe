"""What the losses from labels share: arguments, the logsumexp of negatives, reductions, and groups."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastqt import autograd
from fastqt.checks import as_ids, check_embeddings, check_flag, check_option, check_scale, input_dtype
from fastqt.distributed import collectives
from fastqt.distributed.group import Group, GroupLike, as_group
from fastqt.distributed.shards import Shards, agree, local_rows, numbers, wanting_gradients, with_a_row
from fastqt.engines import requested
from fastqt.functional import contrastive_loss, log_sum_exp
from fastqt.losses.common import row_numbers, scores
from fastqt.losses.positives import Positives, SameLabel, blocks_of, find_positives
from fastqt.losses.same_label import SAME_LABEL, SameLabelProblem
from fastqt.options import Backend, Memory, Reduction
from fastqt.problem import REDUCTIONS, check_memory, loss_dtype, reduce, unit_rows

FUNCTIONS = {"supcon": "fastqt.supcon_loss", "ntxent": "fastqt.ntxent_loss"}


class Labelled(NamedTuple):
    """Rows and the candidates that they are compared with, checked."""

    embeddings: Tensor  # (N, D)
    labels: Tensor  # (N,) int64
    candidates: Tensor  # (M, D)
    candidate_labels: Tensor  # (M,) int64
    own: Tensor | None  # (N,) int64, the candidate of the same label that is the row itself; -1: none


def loss_from_labels(
    link: str,
    embeddings: Tensor,
    labels: Tensor,
    candidates: Tensor | None,
    candidate_labels: Tensor | None,
    reduction: Reduction,
    group: GroupLike | None,
    **options: Any,
) -> Tensor:
    """The reduced loss.

    Args:
        link: "supcon" or "ntxent".
        embeddings, labels, candidates, candidate_labels, reduction, group: as of the public functions.
        **options: scale, normalize, memory and backend.
    """
    if torch.compiler.is_compiling():
        # Every batch has blocks of other sizes: the loss is left out of the graph.
        untraced = torch.compiler.disable(loss_from_labels)
        given_ones = embeddings, labels, candidates, candidate_labels
        found: Tensor = untraced(link, *given_ones, reduction, group, **options)
        return found
    given: dict[str, Any] = {
        "embeddings": embeddings,
        "labels": labels,
        "candidates": candidates,
        "candidate_labels": candidate_labels,
    }
    if group is not None:
        return _over_group(as_group(group), link, given, reduction, options)
    check_embeddings(("candidates",), embeddings=embeddings, candidates=candidates)
    _check_rest(given, reduction, options)
    own = row_numbers(len(embeddings), given["labels"].device) if candidates is None else None
    if candidates is None:
        given |= {"candidates": embeddings, "candidate_labels": given["labels"]}
    given["candidate_labels"] = given["candidate_labels"].to(given["labels"].device)
    rows = Labelled(**given, own=own)
    positives = positives_of(rows, options["memory"])
    if reduction != "mean":
        return labelled_loss(link, rows, positives, reduction, **options)
    return labelled_loss(link, rows, positives, "sum", **options) / max(_terms(link, positives), 1)


def positives_of(x: Labelled, memory: Memory) -> Positives:
    """The positives of each row."""
    return find_positives(x.labels, x.candidate_labels, x.own, x.embeddings.is_cuda, memory)


def labelled_loss(
    link: str,
    x: Labelled,
    positives: Positives,
    reduction: Reduction,
    *,
    scale: float | Tensor,
    normalize: bool,
    memory: Memory,
    backend: Backend | None,
) -> Tensor:
    """The losses of rows (N,) for reduction="none", otherwise their sum."""
    # With one positive a row it competes with the same cells in both losses.
    alike = link == "supcon" or positives.pairs == len(positives.rows)
    eager = requested(backend) == "reference"
    if alike and (eager or positives.may_be_listed(x.embeddings.is_cuda)):
        return _of_targets(x, positives, reduction, scale, normalize, memory, backend)
    # As an engine would do: rounded to what a product reads, then to norm 1.
    queries = _prepared(x.embeddings, normalize)
    candidates = queries if x.candidates is x.embeddings else _prepared(x.candidates, normalize)
    others = log_sum_exp(
        queries,
        candidates,
        scale=scale,
        query_groups=x.labels,
        candidate_groups=x.candidate_labels,
        memory=memory,
        backend=backend,
    )
    dtype = loss_dtype(queries)
    queries, candidates = queries.to(dtype), candidates.to(dtype)
    if eager:
        return reduce(_eager_pairs(queries, candidates, others, scale, positives), reduction)
    blocks = blocks_of(positives, queries.shape[1], queries.element_size())
    p = SameLabelProblem(queries, candidates, others, scale, positives.to(queries.device), blocks, link)
    return autograd.loss_of(p, reduction, SAME_LABEL, FUNCTIONS[link])


def _of_targets(
    x: Labelled,
    positives: Positives,
    reduction: Reduction,
    scale: float | Tensor,
    normalize: bool,
    memory: Memory,
    backend: Backend | None,
) -> Tensor:
    """SupCon as a cross-entropy whose targets are listed."""
    N, device = len(x.embeddings), x.embeddings.device
    groups: dict[str, Any] = {}
    itself = x.own is not None and x.candidates is x.embeddings
    if x.own is not None and not itself:
        # Only a row and the candidate that is the row itself share a group.
        own, ids = x.own.to(device), row_numbers(N, device)
        columns = ids.new_full((len(x.candidates),), -1)
        columns[own[own >= 0]] = ids[own >= 0]
        groups = {"query_groups": ids, "candidate_groups": columns}
    found = contrastive_loss(
        x.embeddings,
        x.candidates,
        SameLabel(positives, N),
        diagonal="exclude" if itself else "keep",
        scale=scale,
        normalize=normalize,
        reduction=reduction,
        memory=memory,
        backend=backend,
        **groups,
    )
    # That loss is the cross-entropy less the targets' entropy, which is the logarithm of their number.
    if positives.log_counts == 0:
        return found
    if reduction == "sum":
        return found + positives.log_counts
    entropies = positives.counts.to(found).log()
    return found + torch.zeros_like(found).index_copy_(0, positives.rows.to(device), entropies)


def _prepared(x: Tensor, normalize: bool) -> Tensor:
    x = x.to(input_dtype(x))
    return unit_rows(x) if normalize else x


def _eager_pairs(
    queries: Tensor, candidates: Tensor, others: Tensor, scale: float | Tensor, positives: Positives
) -> Tensor:
    """NT-Xent's losses of rows (N,) in plain PyTorch, from the list of all pairs."""
    rows, columns = (index.to(queries.device) for index in positives.listed())
    leads = others[rows] - scores(queries[rows], candidates[columns], scale)
    return torch.zeros_like(others).index_add(0, rows, F.softplus(leads, threshold=50))


def _terms(link: str, positives: Positives) -> int:
    """What a mean divides by: rows that have a positive, or all pairs."""
    return len(positives.rows) if link == "supcon" else positives.pairs


def _check_rest(given: dict[str, Any], reduction: Reduction, options: dict[str, Any]) -> None:
    """Checks what is no embeddings; in `given` labels become int64."""
    if (given["candidates"] is None) != (given["candidate_labels"] is None):
        missing = "candidates" if given["candidates"] is None else "candidate_labels"
        raise ValueError(
            f"{missing}: want it together with the other of the two, got None; give both or neither"
        )
    for name, of in (("labels", "embeddings"), ("candidate_labels", "candidates")):
        if given[of] is None:
            continue
        given[name] = as_ids(name, given[name])
        if len(given[name]) != len(given[of]):
            raise ValueError(
                f"{name}: want one for each of the {len(given[of])} {of}, got {len(given[name])}"
            )
    check_scale(options["scale"], given["embeddings"].dtype)
    check_flag("normalize", options["normalize"])
    check_option("reduction", reduction, REDUCTIONS)
    check_memory(options["memory"])


def _over_group(
    group: Group, link: str, given: dict[str, Any], reduction: Reduction, options: dict[str, Any]
) -> Tensor:
    """The loss of all ranks' rows, each rank's against the candidates of all."""
    check = partial(_checked_at_rank, group, given, reduction, options)
    shards = agree(group, FUNCTIONS[link], check)
    rows = _gathered(shards, given)
    with shards.agreeing():
        if len(given["embeddings"]):
            positives = positives_of(rows, options["memory"])
            local = labelled_loss(link, rows, positives, "none" if reduction == "none" else "sum", **options)
            terms = _terms(link, positives)
        else:
            leaves = given["embeddings"], rows.candidates, options["scale"]
            local, terms = collectives.nothing(leaves, reduction), 0
    if reduction != "mean":
        return collectives.reduced(local, reduction, 0, shards.group)
    counted = torch.tensor(terms, device=rows.candidates.device)
    return collectives.total(local, shards.group) / collectives.add_up(counted, shards.group).clamp(min=1)


def _checked_at_rank(
    group: Group, given: dict[str, Any], reduction: Reduction, options: dict[str, Any]
) -> tuple[dict[str, int], dict[str, Hashable]]:
    """Checks what a rank can check by itself; its numbers of rows, and what all ranks have to give alike."""
    for name in ("embeddings", "candidates"):
        if given[name] is not None:
            given[name] = local_rows(name, given[name])
    embeddings, candidates = given["embeddings"], given["candidates"]
    check_embeddings(
        ("candidates",),
        embeddings=with_a_row(group, embeddings),
        candidates=with_a_row(group, candidates),
    )
    _check_rest(given, reduction, options)
    sizes = {"embeddings": len(embeddings)}
    if candidates is not None:
        sizes["candidates"] = len(candidates)
    leaves = {"embeddings": embeddings, "candidates": candidates, "scale": options["scale"]}
    return sizes, {
        "width": embeddings.shape[1],
        "dtype": str(input_dtype(embeddings)),
        "device": embeddings.device.type,
        "reduction": reduction,
        "normalize": options["normalize"],
        "candidates given": candidates is not None,
        "requires_grad": wanting_gradients(leaves),
        **numbers(group, {"scale": options["scale"]}),
    }


def _gathered(shards: Shards, given: dict[str, Any]) -> Labelled:
    """This rank's rows, and the candidates of all ranks."""
    embeddings, labels = given["embeddings"], given["labels"].to(given["embeddings"].device)
    source = "embeddings" if given["candidates"] is None else "candidates"
    counts, dtype = shards.counts[source], input_dtype(embeddings)
    source_labels = labels if source == "embeddings" else given["candidate_labels"].to(embeddings.device)
    candidates = collectives.gather(given[source], counts, shards.group, dtype)
    candidate_labels = collectives.gather_constant(source_labels, counts, shards.group)
    own = None
    if source == "embeddings":
        own = row_numbers(len(embeddings), embeddings.device) + shards.first("embeddings")
    return Labelled(embeddings, labels, candidates, candidate_labels, own)
