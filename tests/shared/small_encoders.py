"""Small encoders of rows of numbers, and how far their gradients are from those of a plain step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

WIDTH = 6


def encoder(dropout: float = 0.3, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """The same weights in every call."""
    generator = torch.Generator().manual_seed(5)
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 4)).to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) / 2)
    return model


def batch(rows: int = 11, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """(rows, WIDTH) normally distributed numbers."""
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def gradients_of(*modules: nn.Module) -> list[Tensor]:
    """The gradients of all parameters, zeros where there are none."""
    parameters = dict.fromkeys(p for module in modules for p in module.parameters())
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters]


def encoded_in_chunks(call: Callable[[Tensor], Tensor], x: Tensor, chunk_size: int) -> Tensor:
    """What an encoder makes of a batch with graph, drawing dropout as chunks of this size do."""
    return torch.cat([call(part) for part in x.split(chunk_size)])


def distance(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The largest difference of gradients, relative to the largest of those that are wanted."""
    largest = max(float(g.abs().max()) for g in wanted)
    return max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True)) / largest
