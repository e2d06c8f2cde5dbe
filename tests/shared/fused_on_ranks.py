"""open_clip's loss of gathered features, plain and in the block, of a model that DDP wraps. See ranks.py."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
import torch.distributed.nn  # whose all_gather has a gradient
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fastqt

N, D = 12, 5


class Towers(nn.Module):
    """Two encoders and the logarithm of a scale."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text = (nn.Linear(D, D, dtype=torch.float64) for _ in range(2))
        self.log_scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        image, text = F.normalize(self.image(images), dim=-1), F.normalize(self.text(texts), dim=-1)
        return image, text, self.log_scale.exp()


def gathered(features: Tensor, *, with_gradient: bool, local_loss: bool) -> Tensor:
    """As open_clip gathers: without a gradient this rank's rows are put back, where the loss is of all."""
    if with_gradient:
        return torch.cat(torch.distributed.nn.all_gather(features), dim=0)
    blocks = [torch.zeros_like(features) for _ in range(dist.get_world_size())]
    dist.all_gather(blocks, features)
    if not local_loss:
        blocks[dist.get_rank()] = features
    return torch.cat(blocks, dim=0)


def clip_loss(image: Tensor, text: Tensor, scale: Tensor, *, with_gradient: bool, local_loss: bool) -> Tensor:
    every_image, every_text = (
        gathered(x, with_gradient=with_gradient, local_loss=local_loss) for x in (image, text)
    )
    if local_loss:
        per_image, per_text = scale * image @ every_text.T, scale * text @ every_image.T
    else:
        per_image = scale * every_image @ every_text.T
        per_text = per_image.T
    labels = torch.arange(per_image.shape[0], dtype=torch.long)
    if local_loss:
        labels = labels + per_image.shape[0] * dist.get_rank()
    return (F.cross_entropy(per_image, labels) + F.cross_entropy(per_text, labels)) / 2


def step(block: bool, with_gradient: bool, local_loss: bool) -> tuple[list[Tensor], str]:
    """The loss and all gradients of one step, and what the block reports."""
    model = DistributedDataParallel(Towers())
    generator = torch.Generator().manual_seed(dist.get_rank())
    rows = [torch.randn(N, D, generator=generator, dtype=torch.float64) for _ in range(2)]
    whole = fastqt.fused(strict=True, least_cells=1) if block else contextlib.nullcontext()
    with whole as report:
        loss = clip_loss(*model(*rows), with_gradient=with_gradient, local_loss=local_loss)
        loss.backward()
    return [loss.detach(), *(x.grad for x in model.parameters())], str(report)
