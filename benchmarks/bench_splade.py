"""SPLADE's pooling of float32 on a CPU, forward and backward, beside plain PyTorch's of all logits.

pytest --benchmark --benchmark-json benchmarks/results/splade.json benchmarks/bench_splade.py

The texts have all lengths from half of L to L. The bias decides how many words have a weight in a text: at 0
half of them, as before training, and "sparse" about one in a hundred, as in a trained model. The product is
that of all tokens with all words, which the forward pass of either takes; plain PyTorch's backward pass takes
two more.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

import fastqt
from benchmarks.measure.timing import in_turns_with
from benchmarks.measure.workloads import forward_and_backward, peak_above_gradients
from fastqt.engines.own_products import multiply

SIZES = [(64, 128, 30522, 768)]  # (B, L, V, D)
SHARES = {"dense": 0.5, "sparse": 0.01}  # of the words that have a weight in a text
ROUNDS = 5


def inputs(B: int, L: int, V: int, D: int, share: float) -> tuple[list[Tensor], Tensor]:
    """Leaves and a mask; the bias is such that about a share of the words has a weight."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(B, L, D, generator=generator)
    weight = torch.randn(V, D, generator=generator) / D**0.5
    lengths = torch.randint(L // 2, L + 1, (B, 1), generator=generator)
    mask = torch.arange(L) < lengths
    sample = (hidden[:4] @ weight[:2000].T).masked_fill(~mask[:4, :, None], -torch.inf).amax(1)
    bias = -sample.flatten().quantile(1 - share).expand(V).clone()
    return [x.requires_grad_() for x in (hidden, weight, bias)], mask


def eager(hidden: Tensor, weight: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    logits = torch.nn.functional.linear(hidden, weight, bias) * mask[:, :, None]
    return logits.relu().log1p().amax(1)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize(("B", "L", "V", "D"), SIZES)
def test_splade(benchmark, B, L, V, D, share):
    leaves, mask = inputs(B, L, V, D, SHARES[share])
    upstream = torch.randn(B, V, generator=torch.Generator().manual_seed(1))

    def loss(pool: Callable[..., Tensor]) -> Tensor:
        return (pool(*leaves, mask) * upstream).sum()

    pools = {"ours": fastqt.splade_pool, "eager": eager}
    computed = {name: forward_and_backward(partial(loss, pool), *leaves) for name, pool in pools.items()}
    peaks = {name: peak_above_gradients(function, leaves) for name, function in computed.items()}
    hidden, weight = (x.detach() for x in leaves[:2])
    out = torch.empty(2048, B * L)

    def product() -> None:
        for tile in weight.split(len(out)):
            multiply(out[: len(tile)], tile, hidden.flatten(0, 1).T)

    others = {"eager": computed["eager"], "gemm": product}
    seconds, by_name = in_turns_with(benchmark, computed["ours"], others, ROUNDS)
    benchmark.extra_info.update(
        B=B,
        L=L,
        V=V,
        D=D,
        words=share,
        share=float((fastqt.splade_pool(hidden, weight, leaves[2].detach(), mask) > 0).double().mean()),
        seconds=seconds,
        eager_seconds=by_name["eager"],
        product_seconds=by_name["gemm"],
        peaks_above_gradients=peaks,
    )
