"""The errors of bfloat16 gradients over ranks, and of losses on devices that have no float64.

The functions whose names begin with `errors` run on every rank (see ranks.py).
"""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import fastqt
from fastqt.distributed import Group
from tests.shared.without_float64 import WithoutFloat64

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


ROWS, WIDTH = 24, 16


def batch(converged: bool) -> tuple[Tensor, Tensor]:
    """Pairs (ROWS, WIDTH) of float32."""
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, ROWS, WIDTH, generator=generator)
    return a, a + 0.1 * b if converged else b


def exact(a: Tensor, b: Tensor, loss: str) -> list[Tensor]:
    """The mean loss and both gradients, in float64."""
    x, y = (z.double().requires_grad_() for z in (a, b))
    scores, own = SCALE * F.normalize(x) @ F.normalize(y).T, torch.arange(len(a))
    if loss == "siglip_loss":
        total = -F.logsigmoid((2 * torch.eye(ROWS) - 1) * (scores - 10)).sum(1).mean()
    elif loss == "clip_loss":
        total = (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2
    else:
        total = F.cross_entropy(scores, own)
    return [total.detach(), *torch.autograd.grad(total, (x, y))]


def errors_without_float64() -> list[tuple[str, float]]:
    """Of each case: what it is, and the largest error of its loss and gradients by the rows of this rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    own, found = slice(rank * ROWS // size, (rank + 1) * ROWS // size), []
    for converged in (False, True):
        a, b = batch(converged)
        for loss in ("info_nce_loss", "clip_loss", "siglip_loss"):
            truth = exact(a, b, loss)
            truth[1:] = [x[own] for x in truth[1:]]
            options: dict[str, Any] = {"bias": -10.0} if loss == "siglip_loss" else {}
            for exchange in ("gather", "ring"):
                group = Group(exchange=exchange, gradients="sum")
                x, y = (z[own].clone().requires_grad_() for z in (a, b))
                with WithoutFloat64():
                    total = getattr(fastqt, loss)(
                        x, y, scale=SCALE, normalize=True, group=group, backend="torch", **options
                    )
                    results = [total.detach(), *torch.autograd.grad(total, (x, y))]
                case = f"{loss} {exchange} {'converged' if converged else 'random'}"
                wrong = [float((p - q).norm() / q.norm()) for p, q in zip(results, truth, strict=True)]
                found.append((case, max(wrong)))
    return found


def errors_of_a_ring_of_kernels() -> list[float]:
    """Those of a loss and its gradients where the engine of kernels is asked for."""
    rank, size = dist.get_rank(), dist.get_world_size()
    own, (a, b) = slice(rank * ROWS // size, (rank + 1) * ROWS // size), batch(False)
    truth = exact(a, b, "info_nce_loss")
    truth[1:] = [x[own] for x in truth[1:]]
    x, y = (z[own].clone().requires_grad_() for z in (a, b))
    with mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"}):
        group = Group(exchange="ring", gradients="sum")
        total = fastqt.info_nce_loss(x, y, scale=SCALE, normalize=True, group=group, backend="triton")
        results = [total.detach(), *torch.autograd.grad(total, (x, y))]
    return [float((p - q).norm() / q.norm()) for p, q in zip(results, truth, strict=True)]


WALKS = ("clip_loss", "dcl_loss", "hcl_loss")


def errors_of_kernels_with_masks() -> list[tuple[str, float]]:
    """Those of losses whose kernels walk over scores in both directions, and whose ids leave cells.

    Half of the ids that are equal are of other ranks' rows.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    own, (a, b) = slice(rank * ROWS // size, (rank + 1) * ROWS // size), batch(False)
    ids = torch.arange(ROWS) % (ROWS // 3)
    found = []
    for loss in WALKS:
        x, y = (z.double().requires_grad_() for z in (a, b))
        options = {"scale": 4.0, "backend": "reference"}
        whole = getattr(fastqt, loss)(x, y, exclude=fastqt.Same(ids), **options)
        truth = [whole.detach(), *(z[own] for z in torch.autograd.grad(whole, (x, y)))]

        x, y = (z[own].clone().requires_grad_() for z in (a, b))
        with mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"}):
            group = Group(gradients="sum")
            options = {"scale": 4.0, "backend": "triton", "group": group}
            total = getattr(fastqt, loss)(x, y, exclude=fastqt.Same(ids[own]), **options)
            results = [total.detach(), *torch.autograd.grad(total, (x, y))]
        wrong = [float((p - q).norm() / q.norm()) for p, q in zip(results, truth, strict=True)]
        found.append((loss, max(wrong)))
    return found
