"""What open_clip's tests check of its gathered loss and of SigLIP, of fastqt's losses on the ranks.

The functions here run on every rank (see ranks.py). Source of the properties: mlfoundations/open_clip,
tests/test_loss.py and tests/test_siglip_chunked_loss.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import fastqt
from benchmarks.conventions import open_clip_losses
from fastqt.distributed import Group
from fastqt.distributed.collectives import gather

D, SCALE, BIAS = 32, 10.0, -10.0


def gathered_transposed() -> tuple[Tensor, Tensor, Tensor]:
    """All ranks' rows of a transposed tensor, what they have to be, and the gradient of a rank's own.

    Row i of the gathered rows counts i + 1 times on rank 0, twice as often on rank 1, and so on.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.arange(6.0).view(2, 3)
    mine = (x + 10 * rank).T.requires_grad_()
    found = gather(mine, (3,) * size, Group())
    weights = (1.0 + torch.arange(3 * size)) * (rank + 1)
    (weights[:, None] * found).sum().backward()
    return found.detach(), torch.cat([(x + 10 * other).T for other in range(size)]), mine.grad


def batch(N: int) -> tuple[Tensor, Tensor]:
    """Normalised rows of both sides, as in open_clip's test."""
    generator = torch.Generator().manual_seed(0)
    a, b = (F.normalize(torch.randn(N, D, generator=generator)) for _ in range(2))
    return a, b


def siglip_of_one_process(
    a: Tensor, b: Tensor, scale: Tensor, bias: Tensor, no_pairs: bool = False
) -> Tensor:
    """SigLIP in plain PyTorch; with `no_pairs`, of rows that belong to none of the candidates."""
    signs = -torch.ones(len(a), len(b)) + (0 if no_pairs else 2 * torch.eye(len(a)))
    return -F.logsigmoid(signs * (scale * a @ b.T + bias)).sum() / len(a)


def leaves_of(a: Tensor, b: Tensor) -> list[Tensor]:
    return [x.clone().requires_grad_() for x in (a, b, torch.tensor(SCALE), torch.tensor(BIAS))]


def differences(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> list[float]:
    return [float((x - y).abs().max()) if x.numel() else 0.0 for x, y in zip(ours, theirs, strict=True)]


def siglip_in_parts(N: int, counts: Sequence[int], no_pairs: bool, exchange: str) -> list[float]:
    """How far value and gradients are from one process's, if the ranks have so many of the rows."""
    rank = dist.get_rank()
    group = Group(shards="uneven", gradients="sum", exchange=exchange)
    whole = leaves_of(*batch(N))
    wanted = siglip_of_one_process(*whole, no_pairs=no_pairs)
    wanted.backward()
    a, b = (x.split(list(counts))[rank] for x in batch(N))
    own = leaves_of(a, b)
    options: dict[str, Any] = {"scale": own[2], "bias": own[3], "normalize": False, "group": group}
    if no_pairs:
        nothing = torch.full((len(a),), -100)
        found = fastqt.sigmoid_loss(*own[:2], nothing, diagonal="keep", **options)
    else:
        found = fastqt.siglip_loss(*own[:2], **options)
    found.backward()
    for number in own[2:]:
        dist.all_reduce(number.grad)
    parts = [*(x.grad.split(list(counts))[rank] for x in whole[:2]), *(x.grad for x in whole[2:])]
    return differences([found, *(x.grad for x in own)], [wanted, *parts])


def in_place_of(module_of: Callable[[Any], Any], ours: Callable[..., Tensor]) -> list[float]:
    """How far our loss is from an open_clip module on the same ranks.

    Compared are the loss that ranks have on average, the gradients of scale and bias as DDP averages them,
    and those of the features.
    """
    losses = open_clip_losses()
    rank, size = dist.get_rank(), dist.get_world_size()
    a, b = (x.chunk(size)[rank] for x in batch(16 * size))
    found = []
    for loss in (ours, module_of(losses)):
        own = leaves_of(a, b)
        value = loss(*own)
        (value + 0 * own[3]).backward()
        averaged = [value.detach().clone(), own[2].grad, own[3].grad]
        for number in averaged:
            dist.all_reduce(number)
            number /= size
        found.append([*averaged, own[0].grad, own[1].grad])
    return differences(*found)


def clip_in_place(exchange: str) -> list[float]:
    """Of `ClipLoss` in the one form whose gradients are right and whose scores are a rank's own rows."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = Group(exchange=exchange)
    return in_place_of(
        lambda losses: _of_three(
            losses.ClipLoss(local_loss=True, gather_with_grad=True, rank=rank, world_size=size)
        ),
        lambda a, b, scale, _: fastqt.clip_loss(a, b, scale=scale, normalize=False, group=group),
    )


def siglip_in_place(way: str, exchange: str) -> list[float]:
    """Of `SigLipLoss` with one of its ways to exchange."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = Group(exchange=exchange)
    return in_place_of(
        lambda losses: losses.SigLipLoss(rank=rank, world_size=size, dist_impl=way),
        lambda a, b, scale, bias: fastqt.siglip_loss(
            a, b, scale=scale, bias=bias, normalize=False, group=group
        ),
    )


def _of_three(module: Any) -> Callable[..., Tensor]:
    return lambda a, b, scale, _: module(a, b, scale)
