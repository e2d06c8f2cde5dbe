"""A memory bank that all ranks fill together, beside one of a single process that is given the whole batch.

The functions here run on every rank (see ranks.py).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fastqt
from fastqt.distributed import Group
from tests.shared.sharded_losses import part

WIDTH, SIZE = 6, 15


def batch(seed: int, N: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(N, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    return a, b


def filled_together(counts: tuple[int, ...], exchange: str) -> tuple[bool, list[float]]:
    """Whether this rank holds what one process does, and how far a loss with a shard of it is off.

    The loss is taken before each batch is enqueued; its errors are of the value and of the gradients.
    """
    rank, uneven = dist.get_rank(), "equal" if len(set(counts)) == 1 else "uneven"
    of_rows, of_loss = Group(shards=uneven), Group(shards="uneven", gradients="sum", exchange=exchange)
    mine, whole = (fastqt.nn.Queue(SIZE, WIDTH, dtype=torch.float64, labels=True) for _ in range(2))
    equal, errors = True, []
    for seed in range(6):
        a, b = (x.requires_grad_() for x in batch(seed, sum(counts)))
        own = [part(x.detach(), counts, rank).requires_grad_() for x in (a, b)]
        wanted = fastqt.info_nce_loss(a, b, negatives=whole.embeddings)
        found = fastqt.info_nce_loss(*own, negatives=mine.shard(of_loss), group=of_loss)
        labels = torch.arange(len(a)) + 100 * seed
        mine.enqueue(own[1], part(labels, counts, rank), group=of_rows)
        whole.enqueue(b, labels)
        wanted.backward()
        found.backward()
        errors.append(float((found - wanted).abs()))
        for x, y in zip(own, (a, b), strict=True):
            difference = (x.grad - part(y.grad, counts, rank)).abs()
            errors.append(float(difference.max()) if len(x) else 0.0)
        equal &= all(torch.equal(x, y) for x, y in zip(mine.buffers(), whole.buffers(), strict=True))
    return equal, errors


def queues_that_differ() -> None:
    """The first rank's queue has labels."""
    first = dist.get_rank() == 0
    queue = fastqt.nn.Queue(SIZE, WIDTH, labels=first)
    queue.enqueue(torch.zeros(3, WIDTH), torch.arange(3) if first else None, group=dist.group.WORLD)


def wrong_labels() -> None:
    """The first rank gives a label too few."""
    queue = fastqt.nn.Queue(SIZE, WIDTH, labels=True)
    labels = torch.arange(2 if dist.get_rank() == 0 else 3)
    queue.enqueue(torch.zeros(3, WIDTH), labels, group=dist.group.WORLD)


class _Contrast(nn.Module):
    """Momentum contrast, whose queue is among the module's buffers."""

    def __init__(self, group: Group | None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.encoder = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.queue = fastqt.nn.Queue(SIZE, WIDTH, dtype=torch.float64)
        self.group = group

    def forward(self, x: Tensor, keys: Tensor) -> Tensor:
        own = torch.zeros(len(x), dtype=torch.int64)
        loss = fastqt.contrastive_loss(
            *(self.encoder(x), keys, fastqt.Diagonal()),
            diagonal="keep",
            normalize=True,
            exclude=fastqt.Same(own),
            negatives=self.queue.embeddings,
        )
        self.queue.enqueue(keys, group=self.group)
        return loss


def in_ddp() -> float:
    """How far the gradients are from one process's, where DDP sends the first rank's buffers to the others.

    Two forward passes come before their backward passes, so that a graph is older than what DDP writes.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    alone, shared = _Contrast(None), DistributedDataParallel(_Contrast(Group()))
    for step in range(3):
        pairs = [batch(2 * step + i, 2 * size) for i in range(2)]
        wanted = sum(alone(*pair) for pair in pairs)
        found = sum(shared(*(x.chunk(size)[rank] for x in pair)) for pair in pairs)
        wanted.backward()
        found.backward()
    return max(
        float((x.grad - y.grad).abs().max())
        for x, y in zip(shared.parameters(), alone.parameters(), strict=True)
    )
