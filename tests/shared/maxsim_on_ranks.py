"""MaxSim over the documents of all ranks, beside one process with the whole batch.

The function here runs on every rank (see ranks.py). All draw the batch from one seed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import fastqt
from fastqt.distributed import Group
from tests.shared.every_loss import maxsim
from tests.shared.tolerances import relative

WIDTH, TOKENS = 6, 3  # of a query


@dataclass
class Case:
    """A batch over ranks.

    Attributes:
        counts: the number of queries of each rank.
        documents: of each rank, those of the queries first.
        tokens: what each rank pads its documents to.
        masked: whether masks are given; otherwise all tokens count.
        converged: whether queries have nearly all probability.
        options: of the loss.
        group: of the group.
    """

    counts: tuple[int, ...]
    documents: tuple[int, ...]
    tokens: tuple[int, ...]
    masked: bool = True
    converged: bool = False
    dtype: torch.dtype = torch.float64
    options: dict[str, Any] | None = None
    group: dict[str, Any] | None = None


def compare(case: Case) -> dict[str, float]:
    """How far the value and this rank's gradients are from those of the formula, relatively."""
    rank, generator = dist.get_rank(), torch.Generator().manual_seed(0)
    parts = [_drawn(case, each, generator) for each in range(len(case.counts))]
    scale = torch.tensor(1.75, dtype=torch.float64, requires_grad=True)
    truth = [{name: x.double() if x.is_floating_point() else x for name, x in one.items()} for one in parts]
    leaves = [one[name].requires_grad_() for one in truth for name in ("queries", "documents")]

    # In one process the documents of queries are first, and padded to one length.
    most = max(case.tokens)
    padded = [F.pad(one["documents"], (0, 0, 0, most - one["documents"].shape[1])) for one in truth]
    masks = [F.pad(one["document_mask"], (0, most - one["document_mask"].shape[1])) for one in truth]
    order = [slice(None, n) for n in case.counts], [slice(n, None) for n in case.counts]
    documents, mask = (
        torch.cat([x[rows] for group in order for x, rows in zip(side, group, strict=True)])
        for side in (padded, masks)
    )
    queries, query_mask = (torch.cat([one[name] for one in truth]) for name in ("queries", "query_mask"))
    rows = maxsim(queries, documents, query_mask, mask, scale)
    reduction = (case.options or {}).get("reduction", "mean")
    wanted = {"mean": rows.mean(), "sum": rows.sum(), "none": rows.split(case.counts)[rank]}[reduction]
    expected = torch.autograd.grad((rows if reduction == "none" else wanted).sum(), [*leaves, scale])

    shards = (
        "equal" if all(len(set(x)) == 1 for x in (case.counts, case.documents, case.tokens)) else "uneven"
    )
    group = Group(shards=shards, **(case.group or {}))
    own = {
        name: x.detach().clone().requires_grad_(x.is_floating_point())
        for name, x in parts[rank].items()
        if case.masked or "mask" not in name
    }
    own_scale = scale.detach().to(torch.promote_types(case.dtype, torch.float32)).requires_grad_()
    found = fastqt.maxsim_loss(**own, scale=own_scale, group=group, **(case.options or {}))
    found.sum().backward()

    factor = dist.get_world_size() if group.gradients == "average" else 1
    dist.all_reduce(own_scale.grad)
    return {
        "value": relative(found, wanted),
        "queries": relative(own["queries"].grad / factor, expected[2 * rank]),
        "documents": relative(own["documents"].grad / factor, expected[2 * rank + 1]),
        "scale": relative(own_scale.grad / factor, expected[-1]),
    }


def _drawn(case: Case, rank: int, generator: torch.Generator) -> dict[str, Tensor]:
    n, m, tokens = case.counts[rank], case.documents[rank], case.tokens[rank]
    queries = torch.randn(n, TOKENS, WIDTH, generator=generator)
    documents = torch.randn(m, tokens, WIDTH, generator=generator)
    query_mask, document_mask = (torch.ones(x.shape[:2], dtype=torch.bool) for x in (queries, documents))
    if case.masked:
        query_mask[:, 1:] = torch.rand(n, TOKENS - 1, generator=generator) < 0.7
        document_mask[:, 1:] = torch.rand(m, tokens - 1, generator=generator) < 0.7
        document_mask[n:] &= torch.arange(m - n)[:, None] > 0  # one hard negative has no token
    if case.converged:
        queries, query_mask = 0 * queries + documents[:n, :1], query_mask | True
    return {
        "queries": queries.to(case.dtype),
        "documents": documents.to(case.dtype),
        "query_mask": query_mask,
        "document_mask": document_mask,
    }


def lengths(tokens: int) -> list[float]:
    """Two losses with equal shards; the documents of the second have so many tokens, of the first two."""
    group = Group()
    return [
        fastqt.maxsim_loss(torch.ones(2, 1, 2), torch.ones(2, length, 2), group=group).item()
        for length in (2, tokens)
    ]
