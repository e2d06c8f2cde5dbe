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
from fastqt.distributed import Group
from fastqt.distributed.collectives import gather
from fastqt.integrations import open_clip
from tests.shared.open_clip_module import open_clip_losses

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
    rank, size = dist.get_rank(), dist.get_world_size()
    a, b = (x.chunk(size)[rank] for x in batch(16 * size))
    found = []
    for loss in (ours, module_of(open_clip_losses())):
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
    options = {"local_loss": True, "gather_with_grad": True, "rank": dist.get_rank()}
    options |= {"world_size": dist.get_world_size()}
    group = Group(exchange=exchange)
    return in_place_of(
        lambda losses: lambda a, b, scale, _: losses.ClipLoss(**options)(a, b, scale),
        lambda a, b, scale, _: fastqt.clip_loss(a, b, scale=scale, normalize=False, group=group),
    )


def siglip_in_place(way: str, exchange: str) -> list[float]:
    """Of `SigLipLoss` with one of its ways to exchange."""
    place = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    options: dict[str, Any] = {"normalize": False, "group": Group(exchange=exchange)}
    return in_place_of(
        lambda losses: losses.SigLipLoss(**place, dist_impl=way),
        lambda a, b, scale, bias: fastqt.siglip_loss(a, b, scale=scale, bias=bias, **options),
    )


def adapted(
    ways: dict[str, bool], whole: list[Tensor], own: list[Tensor], found: Tensor, of_rank: Any
) -> list[float]:
    """How far a loss of this rank is from what the docstring of `ClipLoss` says; `of_rank` has each rank's.

    Compared are the value, the gradients of the features, and that of the scale as DDP averages it.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    local, with_grad = ways["local_loss"], ways["gather_with_grad"]
    constant = local and not with_grad
    of_ranks = [of_rank(*whole[:3], other, constant) for other in range(size)]
    mean = sum(of_ranks) / size
    leaves = torch.autograd.grad(mean, whole[:3], retain_graph=True)
    wanted = [x.chunk(size)[rank] * (size if with_grad else 1) for x in leaves[:2]]
    if constant:
        wanted = [x.chunk(size)[rank] for x in torch.autograd.grad(of_ranks[rank], whole[:2])]
    averaged = own[2].grad.clone()
    dist.all_reduce(averaged)
    value = of_ranks[rank] if local else mean
    return differences([found, own[0].grad, own[1].grad, averaged / size], [value, *wanted, leaves[2]])


def whole_and_own() -> tuple[list[Tensor], list[Tensor]]:
    """Leaves of all rows, and of this rank's, each with a scale and a bias."""
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = leaves_of(*batch(4 * size))
    return whole, leaves_of(*(x.detach().chunk(size)[rank] for x in whole[:2]))


def adapted_clip(ways: dict[str, bool]) -> tuple[list[float], float]:
    """How far our `ClipLoss` is from what its docstring says, and the values of ranks from each other."""
    rank, size = dist.get_rank(), dist.get_world_size()
    whole, own = whole_and_own()
    found = open_clip.ClipLoss(**ways, rank=rank, world_size=size)(*own)
    found.backward()
    values = [torch.zeros(()) for _ in range(size)]
    dist.all_gather(values, found.detach())
    assert own[3].grad is not None
    assert not own[3].grad
    return adapted(ways, whole, own, found, clip_of_rank), float(max(values) - min(values))


def adapted_distillation(ways: dict[str, bool]) -> list[float]:
    """The same of the distillation of our `DistillClipLoss`.

    The teacher's images are the student's texts, and its texts the images.
    """
    whole, own = whole_and_own()
    loss = open_clip.DistillClipLoss(**ways, rank=dist.get_rank(), world_size=dist.get_world_size())
    found = loss(*own[:3], own[1].detach(), own[0].detach(), 2.0)[1]
    found.backward()
    return adapted(ways, whole, own, found, distillation_of_rank)


def rows_of_rank(a: Tensor, rank: int) -> Tensor:
    n = len(a) // dist.get_world_size()
    return torch.arange(rank * n, (rank + 1) * n)


def distillation_of_rank(a: Tensor, b: Tensor, scale: Tensor, rank: int, constant: bool) -> Tensor:
    """The cross-entropy of a rank's rows in both directions, as `clip_of_rank`."""
    own, losses = rows_of_rank(a, rank), []
    for x, y in ((a, b), (b, a)):
        T = (2 * y.detach()[own] @ x.detach().T).softmax(1)
        log_P = (scale * x[own] @ (y.detach() if constant else y).T).log_softmax(1)
        losses.append(-(T * log_P).sum(1).mean())
    return sum(losses) / 2


def clip_of_rank(a: Tensor, b: Tensor, scale: Tensor, rank: int, constant: bool) -> Tensor:
    """The loss of a rank's pairs among all; with `constant` no gradient flows to candidates."""
    own = rows_of_rank(a, rank)
    scores = [scale * x[own] @ (y.detach() if constant else y).T for x, y in ((a, b), (b, a))]
    return sum(F.cross_entropy(each, own) for each in scores) / 2


def adapted_siglip(ring: bool) -> list[float]:
    """How far our `SigLipLoss` is from the loss of a rank's images: value and gradients."""
    rank, size = dist.get_rank(), dist.get_world_size()
    whole, own = whole_and_own()
    module = open_clip.SigLipLoss(rank=rank, world_size=size)
    module.group().exchange = "ring" if ring else module.group().exchange
    found = module(*own)
    found.backward()
    signs = 2 * torch.eye(4 * size) - 1
    cells = -F.logsigmoid(signs * (whole[2] * whole[0] @ whole[1].T + whole[3]))
    rows = cells.sum(1).chunk(size)
    leaves = torch.autograd.grad(sum(x.mean() for x in rows), whole[:2], retain_graph=True)
    numbers = torch.autograd.grad(rows[rank].mean(), whole[2:])
    wanted = [rows[rank].mean(), *(x.chunk(size)[rank] for x in leaves), *numbers]
    return differences([found, *(x.grad for x in own)], wanted)


def beside_theirs(name: str, options: dict[str, Any]) -> list[float]:
    """How far the value and the gradients of our module of this name are from those of open_clip's own.

    A rank's own value and gradients of the features; those of scale and bias as DDP averages them.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    a, b = (x.chunk(size)[rank] for x in batch(16 * size))
    found = []
    for losses in (open_clip, open_clip_losses()):
        own = leaves_of(a, b)
        module = getattr(losses, name)(**options, rank=rank, world_size=size)
        value = module(*own, output_dict=True)["contrastive_loss"]
        value.backward()
        for number in own[2:]:
            dist.all_reduce(number.grad)
        found.append([value.detach(), *(x.grad for x in own)])
    return differences(*found)


def methods_beside_theirs(ways: dict[str, bool]) -> list[float]:
    """The same of the scores and labels that subclasses of `ClipLoss` ask for."""
    rank, size = dist.get_rank(), dist.get_world_size()
    a, b = (x.chunk(size)[rank] for x in batch(4 * size))
    found = []
    for losses in (open_clip, open_clip_losses()):
        own = leaves_of(a, b)
        module = losses.ClipLoss(**ways, cache_labels=True, rank=rank, world_size=size)
        scores = module.get_logits(*own[:3])
        labels = [module.get_ground_truth(a.device, len(scores[0])) for _ in range(2)]
        sum((torch.linspace(0, 1, len(x)) @ x).tanh().mean() for x in scores).backward()
        found.append([*(x.detach() for x in scores), *labels, *(x.grad for x in own[:3])])
    return differences(*found)


def other_place(ranks_further: int, more: int) -> None:
    """Asks for a loss of another place than this process has."""
    rank, size = dist.get_rank() + ranks_further, dist.get_world_size() + more
    open_clip.ClipLoss(rank=rank % size, world_size=size)
