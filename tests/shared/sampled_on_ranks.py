"""Losses of sampled negatives on the ranks of a group, beside those of one process with the whole batch."""

from __future__ import annotations

import torch
import torch.distributed as dist

import fastqt
from fastqt.distributed import Group
from fastqt.losses import binary_window
from tests.shared.tolerances import relative

D, M, K = 5, 13, 3


def _part(counts: tuple[int, ...], rank: int) -> slice:
    first = sum(counts[:rank])
    return slice(first, first + counts[rank])


def pairs(counts: tuple[int, ...], reduction: str) -> dict[str, float]:
    """The errors of `negative_sampling_loss`; each rank has the whole table, and the gradient of its part."""
    generator, N = torch.Generator().manual_seed(0), sum(counts)
    f, g = (torch.randn(n, D, generator=generator, dtype=torch.float64) for n in (N, M))
    positives = torch.randint(M, (N,), generator=generator)
    negatives = torch.randint(M, (N, K), generator=generator)
    scale = torch.tensor(1.3, dtype=torch.float64)
    own = _part(counts, dist.get_rank())

    def computed(rows: slice, group: object) -> tuple[torch.Tensor, list[torch.Tensor]]:
        leaves = [x.clone().requires_grad_() for x in (f[rows], g, scale)]
        loss = fastqt.negative_sampling_loss(
            *leaves[:2],
            positives[rows],
            negatives[rows],
            scale=leaves[2],
            reduction=reduction,
            group=group,
        )
        gradients = torch.autograd.grad(loss.sum(), leaves, materialize_grads=True)
        return loss, list(gradients)

    wanted, of_whole = computed(slice(0, N), None)
    found, of_rank = computed(own, Group(shards="uneven", gradients="sum"))
    for parts in of_rank[1:]:
        dist.all_reduce(parts)
    return {
        "value": relative(found, wanted[own] if reduction == "none" else wanted),
        "queries": relative(of_rank[0], of_whole[0][own]),
        "candidates": relative(of_rank[1], of_whole[1]),
        "scale": relative(of_rank[2], of_whole[2]),
    }


def windows(counts: tuple[int, ...], reduction: str) -> dict[str, float]:
    """The errors of `binary_window_loss` with samples, which here are the contexts that come next."""
    generator, N = torch.Generator().manual_seed(1), sum(counts)
    f, g = (torch.randn(N, D, generator=generator, dtype=torch.float64) for _ in range(2))
    documents = torch.arange(N) // 4
    own = _part(counts, dist.get_rank())
    drawn = binary_window._others
    binary_window._others = lambda own, count, samples, _: (own[:, None] + 1 + torch.arange(samples)) % count
    try:

        def computed(rows: slice, group: object) -> tuple[torch.Tensor, list[torch.Tensor]]:
            leaves = [x.clone().requires_grad_() for x in (f[rows], g[rows])]
            loss = fastqt.binary_window_loss(
                *leaves, document_ids=documents[rows], samples=K, reduction=reduction, group=group
            )
            return loss, list(torch.autograd.grad(loss.sum(), leaves, materialize_grads=True))

        wanted, of_whole = computed(slice(0, N), None)
        found, of_rank = computed(own, Group(shards="uneven", gradients="sum"))
    finally:
        binary_window._others = drawn
    return {
        "value": relative(found, wanted[own] if reduction == "none" else wanted),
        **{
            name: relative(a, b[own])
            for name, a, b in zip(("queries", "candidates"), of_rank, of_whole, strict=True)
        },
    }
