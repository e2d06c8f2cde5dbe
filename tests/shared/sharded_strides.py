"""Losses over ranks of tensors that are no dense matrices, beside dense copies of them in one process.

The functions here run on every rank (see ranks.py).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fastqt
from fastqt.distributed import Group

WIDTH = 6
OPTIONS: dict[str, dict[str, Any]] = {
    "contrastive_loss": {"scale": 0.7},
    "info_nce_loss": {"scale": 3.0},
    "siglip_loss": {"scale": 0.5, "bias": -1.0},
    "clip_loss": {"scale": 3.0},
    "simcse_loss": {},
    "mixcse_loss": {},
    "hcl_loss": {},
}
LAYOUTS = ("dense", "transposed", "strided", "every third", "one row")
UPSTREAMS = ("dense", "strided", "stride 0", "reversed")


def numbers(rows: int, seed: int) -> Tensor:
    """A matrix of numbers of which no two are equal."""
    generator = torch.Generator().manual_seed(seed)
    ranks = torch.randperm(rows * WIDTH, generator=generator).double()
    return (2 * ranks / (rows * WIDTH) - 1).view(rows, WIDTH)


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same values in another layout; "one row" repeats the first row at a stride of 0."""
    if layout == "one row":
        return x[:1].clone().expand(len(x), -1)
    if layout == "transposed":
        return x.T.contiguous().T
    if layout == "every third":
        room = x.new_full((3 * len(x), x.shape[1]), torch.nan)
        room[::3] = x
        return room[::3]
    if layout == "strided":
        room = x.new_full((len(x), 2 * x.shape[1] + 1), torch.nan)
        room[:, 1::2] = x
        return room[:, 1::2]
    return x.clone()


def upstream(n: int, first: int, kind: str) -> Tensor:
    """Gradients of n rows' losses."""
    values = torch.arange(first, first + n, dtype=torch.float64) / 7 + 0.5
    if kind == "strided":
        room = values.new_full((2 * n,), torch.nan)
        room[::2] = values
        return room[::2]
    if kind == "reversed":
        return values.flip(0).clone().flip(0)
    return values[:1].new_ones(1).expand(n) if kind == "stride 0" else values


def compare(loss: str, exchange: str, counts: list[int]) -> dict[str, float]:
    """Of each layout of inputs and upstream gradients, the greatest error of this rank's gradients."""
    rank = dist.get_rank()
    first, N = sum(counts[:rank]), sum(counts)
    own = slice(first, first + counts[rank])
    group = Group(exchange=exchange, gradients="sum", shards="uneven" if len(set(counts)) > 1 else "equal")
    function, options = getattr(fastqt, loss), OPTIONS[loss]
    found = {}
    for layout in LAYOUTS:
        for kind in UPSTREAMS:
            whole, mine = [], []
            for seed in (1, 2):
                parts = []
                x = numbers(N, seed)
                for r, count in enumerate(counts):
                    begin = sum(counts[:r])
                    parts.append(laid_out(x[begin : begin + count], layout if count else "dense"))
                whole.append(torch.cat(parts).clone().requires_grad_())
                mine.append(parts[rank].detach().requires_grad_())
            weights = [upstream(count, sum(counts[:r]), kind) for r, count in enumerate(counts)]
            function(*whole, **options, reduction="none").backward(torch.cat(weights))
            function(*mine, **options, reduction="none", group=group).backward(weights[rank])
            pairs = [(x.grad, y.grad[own]) for x, y in zip(mine, whole, strict=True) if x.numel()]
            errors = [(ours - wanted).abs().max() for ours, wanted in pairs]
            found[f"{layout}, upstream {kind}"] = float(max(errors, default=torch.tensor(0.0)))
    return found
