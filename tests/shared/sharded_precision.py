"""The error of bfloat16 gradients over ranks, beside that of eager PyTorch in one process.

`errors` runs on every rank (see ranks.py).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import fastqt
from fastqt.distributed import Group

SCALE = 20.0
N, D = 512, 64
KINDS = ("random", "converged", "shifted")


def embeddings(kind: str) -> tuple[Tensor, Tensor]:
    """Pairs (N, D) of bfloat16.

    Each has a common mean where they are "shifted", so that the ranks' parts of a gradient cancel each other.
    """
    generator = torch.Generator().manual_seed(0)
    a, b, mean = (torch.randn(rows, D, generator=generator) for rows in (N, N, 1))
    if kind == "converged":
        a = b + 0.1 * a
    if kind == "shifted":
        a, b = a + 2 * mean, b + 2 * mean
    return a.bfloat16(), b.bfloat16()


def eager(a: Tensor, b: Tensor, both: bool, dtype: torch.dtype) -> Tensor:
    """The gradient of b, of a mean over rows, or also over those of b where both directions count."""
    a, b = a.to(dtype), b.clone().to(dtype).requires_grad_()
    scores, own = SCALE * F.normalize(a) @ F.normalize(b).T, torch.arange(len(a))
    loss = F.cross_entropy(scores, own)
    if both:
        loss = (loss + F.cross_entropy(scores.T, own)) / 2
    loss.backward()
    assert b.grad is not None
    return b.grad


def error(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth).norm() / truth.norm())


def errors(dtypes: list[torch.dtype]) -> list[tuple[str, float, float]]:
    """Of each case: what it is, its error, and eager PyTorch's, by the rows of this rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    own, found = slice(rank * N // size, (rank + 1) * N // size), []
    for kind in KINDS:
        a, b = embeddings(kind)
        for loss in ("info_nce_loss", "clip_loss"):
            truth, others = (eager(a, b, loss == "clip_loss", dtype) for dtype in (torch.float64, b.dtype))
            for exchange in ("gather", "ring"):
                for dtype in dtypes:
                    group = Group(exchange=exchange, gradients="sum", return_dtype=dtype)
                    mine = b[own].clone().requires_grad_()
                    getattr(fastqt, loss)(a[own], mine, scale=SCALE, normalize=True, group=group).backward()
                    case = f"{kind} {loss} {exchange} {dtype}"
                    found.append((case, error(mine.grad, truth[own]), error(others[own], truth[own])))
    return found
