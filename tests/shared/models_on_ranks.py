"""A model whose loss is that of all ranks, trained as users do, beside one process with the whole batch.

The functions here run on every rank; see ranks.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import fastqt
from fastqt.distributed import Group

WIDTH, ROWS, STEPS = 7, 6, 2  # rows of each rank

# Module, options, whether one encoder makes both views.
LOSSES: dict[str, tuple[type[fastqt.nn.losses.ScaledLoss], dict[str, Any], bool]] = {
    "contrastive": (fastqt.nn.ContrastiveLoss, {"context_size": 2, "scale": 2.0}, False),
    "info_nce": (fastqt.nn.InfoNCELoss, {"scale": 5.0}, False),
    "clip": (fastqt.nn.CLIPLoss, {}, False),
    "siglip": (fastqt.nn.SigLIPLoss, {"bias": -2.0}, False),
    "simcse": (fastqt.nn.SimCSELoss, {"scale": 5.0}, True),
    "mixcse": (fastqt.nn.MixCSELoss, {"scale": 5.0}, True),
    "mixcse released": (fastqt.nn.MixCSELoss, {"scale": 5.0, "form": "released"}, True),
}


class Trained(nn.Module):
    """Encoders and the loss of their embeddings, whose temperature is learnt."""

    def __init__(self, name: str, group: Group | None) -> None:
        super().__init__()
        torch.manual_seed(3)
        make, options, self.views = LOSSES[name]
        self.left = nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), nn.Linear(9, 5))
        self.right = None if self.views else nn.Sequential(nn.Linear(WIDTH, 5))
        self.loss: nn.Module = make(**options, learn_scale=True, group=group)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        if self.right is not None:
            return self.loss(self.left(a), self.right(b))
        return self.loss(*self.left(torch.cat([a, b])).chunk(2))


class Factor(NamedTuple):
    """A parameter's gradient beside that of one process: by how much it is longer, and how far it is off."""

    factor: float
    error: float  # relative to the norm of the gradient of one process


def batch(step: int, size: int) -> tuple[Tensor, Tensor]:
    """What all ranks have, of two views."""
    generator = torch.Generator().manual_seed(step)
    a, noise = (torch.randn(size * ROWS, WIDTH, generator=generator) for _ in range(2))
    return a, a + noise / 2


def in_ddp(model: Trained) -> tuple[nn.Module, Callable[[], None]]:
    return DistributedDataParallel(model), lambda: None


def in_summing_ddp(model: Trained) -> tuple[nn.Module, Callable[[], None]]:
    def summed(_, bucket):  # DDP refuses annotations that are text.
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, summed)
    return wrapped, lambda: None


def in_fsdp2(model: Trained) -> tuple[nn.Module, Callable[[], None]]:
    """The encoders are sharded, and the loss is in DDP."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for encoder in (model.left, model.right):
        if encoder is not None:
            fully_shard(encoder, mesh=mesh)
    model.loss = DistributedDataParallel(model.loss)
    return model, lambda: None


def whole_in_fsdp2(model: Trained) -> tuple[nn.Module, Callable[[], None]]:
    """The loss is sharded with the encoders: one rank has its temperature and bias, and the others none."""
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, lambda: None


def alone(model: Trained) -> tuple[nn.Module, Callable[[], None]]:
    """Without a wrapper: the gradients are added up by hand."""

    def reduce() -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)

    return model, reduce


WRAPPERS = {
    "ddp": in_ddp,
    "summing hook": in_summing_ddp,
    "fsdp2": in_fsdp2,
    "fsdp2 of all": whole_in_fsdp2,
    "all_reduce": alone,
}


def factors(name: str, wrapper: str, exchange: str = "auto") -> dict[str, Factor]:
    """Of each parameter, in some steps of training: its gradient beside that of one process.

    DDP would raise in the second step if a parameter had no gradient in the first one.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    gradients = "sum" if wrapper in ("summing hook", "all_reduce") else "average"
    single, model = Trained(name, None), Trained(name, Group(gradients=gradients, exchange=exchange))
    wrapped, reduce = WRAPPERS[wrapper](model)
    optimizers = [torch.optim.SGD(x.parameters(), lr=0.1) for x in (single, wrapped)]
    found = {}
    for step in range(STEPS):
        a, b = batch(step, size)
        own = slice(rank * ROWS, (rank + 1) * ROWS)
        whole, loss = single(a, b), wrapped(a[own], b[own])
        whole.backward()
        loss.backward()
        reduce()
        found[f"loss {step}"] = Factor((loss / whole).item(), ((loss - whole).abs() / whole).item())
        gradients_found = {_plain(key): _whole(x.grad) for key, x in wrapped.named_parameters()}
        for key, parameter in single.named_parameters():
            found[f"{key} {step}"] = _factor(gradients_found[key], parameter.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return found


def all_factors(names: list[str], wrapper: str, exchange: str = "auto") -> dict[str, dict[str, Factor]]:
    return {name: factors(name, wrapper, exchange) for name in names}


def _plain(name: str) -> str:
    """A parameter's name without DDP's prefix."""
    return name.replace("module.", "")


def _whole(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def _factor(found: Tensor, wanted: Tensor) -> Factor:
    found, wanted = found.double().flatten(), wanted.double().flatten()
    norm = wanted.norm()
    return Factor(float(found @ wanted / norm**2), float((found - wanted).norm() / norm))
