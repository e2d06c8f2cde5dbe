"""How libraries compute a contrastive loss over several processes, each as its users call it.

open_clip and pytorch-metric-learning are the installed packages. DisCo-CLIP and Inf-CL, whose code needs a
GPU, are written here from what their repositories publish.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import fastqt
from fastqt.distributed import Group
from tests.shared.open_clip_module import open_clip_losses

# Of the rank's rows of both sides, the scale and the bias.
Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
PML = "pytorch-metric-learning"


@dataclass(frozen=True)
class Convention:
    """A loss of a rank's rows in a group of processes, and the same of the whole batch in one process."""

    name: str
    source: str
    of_rank: Loss
    of_batch: Loss


def clip(a: Tensor, b: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """CLIP of one process, in plain PyTorch."""
    scores, pairs = scale * a @ b.T, torch.arange(len(a))
    return (F.cross_entropy(scores, pairs) + F.cross_entropy(scores.T, pairs)) / 2


def siglip(a: Tensor, b: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """SigLIP of one process, in plain PyTorch: summed over candidates, averaged over rows."""
    signs = 2 * torch.eye(len(a)) - 1
    return -F.logsigmoid(signs * (scale * a @ b.T + bias)).sum() / len(a)


def info_nce(a: Tensor, b: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """InfoNCE of one process, in plain PyTorch."""
    return F.cross_entropy(scale * a @ b.T, torch.arange(len(a)))


class _Gathered(torch.autograd.Function):
    """All ranks' rows; of their gradient a rank gets its own rows of the ranks' sum times a factor."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, factor: float) -> Tensor:
        ctx.factor, ctx.n = factor, len(rows)
        gathered = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, rows.contiguous())
        return torch.cat(gathered)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        first = dist.get_rank() * ctx.n
        return ctx.factor * gradient[first : first + ctx.n], None


class _SummedGradient(torch.autograd.Function):
    """A number whose gradient is the sum of the ranks'."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


def _local_clip(a: Tensor, b: Tensor, all_a: Tensor, all_b: Tensor, scale: Tensor) -> Tensor:
    pairs = torch.arange(len(a)) + dist.get_rank() * len(a)
    return (F.cross_entropy(scale * a @ all_b.T, pairs) + F.cross_entropy(scale * b @ all_a.T, pairs)) / 2


def disco_clip(a: Tensor, b: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """Both sides are gathered; the gradients of what was gathered are averaged over the ranks.

    Source: IDEA-Research/DisCo-CLIP, disco/gather.py and test/test.py.
    """
    average = 1 / dist.get_world_size()
    all_a, all_b = _Gathered.apply(a, average), _Gathered.apply(b, average)
    n, first = len(a), dist.get_rank() * len(a)
    return _local_clip(all_a[first : first + n], all_b[first : first + n], all_a, all_b, scale)


def inf_cl(a: Tensor, b: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """Gradients of candidates are summed over the ranks by a ring, and those of the scale as well.

    A gather stands here for the ring: it brings the same rows, and returns the same sums.
    Source: DAMO-NLP-SG/Inf-CLIP, inf_cl/ring.py.
    """
    scale = _SummedGradient.apply(scale)
    return _local_clip(a, b, _Gathered.apply(a, 1.0), _Gathered.apply(b, 1.0), scale)


def of_open_clip() -> Iterator[Convention]:
    losses = open_clip_losses()
    if losses is None:
        return
    source = f"open_clip_torch {version('open_clip_torch')}"
    where = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    for options in (
        {},
        {"local_loss": True},
        {"gather_with_grad": True},
        {"local_loss": True, "gather_with_grad": True},
    ):
        module = losses.ClipLoss(**options, **where)
        name = f"ClipLoss({', '.join(f'{key}=True' for key in options)})"
        yield Convention(name, source, lambda a, b, s, _, module=module: module(a, b, s), clip)
    for way in ("bidir", "shift", "reduce", "gather"):
        module = losses.SigLipLoss(dist_impl=way, **where)
        yield Convention(f'SigLipLoss(dist_impl="{way}")', source, module, siglip)


def of_metric_learning() -> Iterator[Convention]:
    try:
        source = f"{PML} {version(PML)}"
    except PackageNotFoundError:
        return
    from pytorch_metric_learning.losses import NTXentLoss
    from pytorch_metric_learning.utils.distributed import DistributedLossWrapper

    def nt_xent(scale: Tensor, a: Tensor, b: Tensor, first: int, wrap: Callable[[Any], Any]) -> Tensor:
        pairs = torch.arange(first, first + len(a)).repeat(2)
        return wrap(NTXentLoss(temperature=1 / scale))(torch.cat([a, b]), pairs)

    for efficient in (False, True):
        yield Convention(
            f"DistributedLossWrapper(NTXentLoss(…){', efficient=True' if efficient else ''})",
            source,
            lambda a, b, scale, _, efficient=efficient: nt_xent(
                scale,
                a,
                b,
                dist.get_rank() * len(a),
                lambda loss: DistributedLossWrapper(loss, efficient=efficient),
            ),
            lambda a, b, scale, _: nt_xent(scale, a, b, 0, lambda loss: loss),
        )


def of_fastqt() -> Iterator[Convention]:
    source = f"fastqt {fastqt.__version__}"
    for exchange in ("gather", "ring"):
        options: dict[str, Any] = {"group": Group(exchange=exchange), "normalize": False}
        arguments = f'(…, group=Group(exchange="{exchange}"))'

        yield Convention(
            f"clip_loss{arguments}",
            source,
            lambda a, b, scale, _, options=options: fastqt.clip_loss(a, b, scale=scale, **options),
            clip,
        )

        yield Convention(
            f"siglip_loss{arguments}",
            source,
            lambda a, b, scale, bias, options=options: fastqt.siglip_loss(
                a, b, scale=scale, bias=bias, **options
            ),
            siglip,
        )

        yield Convention(
            f"info_nce_loss{arguments}",
            source,
            lambda a, b, scale, _, options=options: fastqt.info_nce_loss(a, b, scale=scale, **options),
            info_nce,
        )


def conventions() -> list[Convention]:
    """All that are installed, in the group of processes that is there."""
    written = "written from its repository"
    return [
        Convention("each rank's own rows", "plain PyTorch", clip, clip),
        *of_open_clip(),
        Convention("DisCo-CLIP", written, disco_clip, clip),
        Convention("Inf-CL", written, inf_cl, clip),
        *of_metric_learning(),
        *of_fastqt(),
    ]
