"""Losses from labels of a batch that the ranks of a group hold, beside those of one process.

The functions here run on every rank (see ranks.py).
"""

from __future__ import annotations

from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import fastqt
from fastqt.distributed import Group
from fastqt.losses import positives

WIDTH = 6


def errors(
    loss: str,
    counts: list[int],
    others: bool,
    reduction: str,
    listed: bool,
    dims: tuple[int, ...] | None = None,
) -> dict[str, float]:
    """How far a rank's value and gradients are from one process's, relative to the greatest number.

    Args:
        loss: the name of a public function.
        counts: the number of rows of each rank.
        others: whether there are candidates of their own, two for each row.
        reduction: of the loss.
        listed: whether pairs may be listed; otherwise they are in blocks.
        dims: of a Matryoshka loss.
    """
    rank, function = dist.get_rank(), getattr(fastqt, loss)
    group = Group(shards="equal" if len(set(counts)) == 1 else "uneven")
    generator = torch.Generator().manual_seed(0)
    N = sum(counts)
    whole = {"embeddings": torch.randn(N, WIDTH, generator=generator, dtype=torch.float64)}
    labels = {"labels": torch.randint(-2, 3, (N,), generator=generator)}
    sizes = {"embeddings": counts, "labels": counts}
    if others:
        whole["candidates"] = torch.randn(2 * N, WIDTH, generator=generator, dtype=torch.float64)
        labels["candidate_labels"] = torch.randint(-2, 3, (2 * N,), generator=generator)
        sizes["candidates"] = sizes["candidate_labels"] = [2 * n for n in counts]
    part = lambda name, x: x.split(sizes[name])[rank].clone()  # noqa: E731

    def computed(mine: bool, **options: object) -> tuple[Tensor, dict[str, Tensor]]:
        take = part if mine else lambda _, x: x.clone()
        leaves = {name: take(name, x).requires_grad_() for name, x in whole.items()}
        leaves["scale"] = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
        found = function(**leaves, **{name: take(name, x) for name, x in labels.items()}, **options)
        found.sum().backward()
        return found.detach(), {name: x.grad for name, x in leaves.items()}

    with mock.patch.object(positives, "PAIR_BYTES", positives.PAIR_BYTES if listed else 2**60):
        more = {} if dims is None else {"matryoshka_dims": dims}
        wanted, wanted_gradients = computed(False, reduction=reduction, **more)
        found, gradients = computed(True, reduction=reduction, group=group, **more)
    pairs = {"value": (found, part("embeddings", wanted) if reduction == "none" else wanted)}
    for name, gradient in gradients.items():
        if name == "scale":
            dist.all_reduce(gradient)
            pairs[name] = gradient / group.size, wanted_gradients[name]
        else:
            pairs[name] = gradient / group.size, part(name, wanted_gradients[name])
    return {name: float((a - b).abs().max()) if a.numel() else 0.0 for name, (a, b) in pairs.items()}
