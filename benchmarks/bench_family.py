"""Losses of the literature, forward and backward, beside eager PyTorch and their matrix products."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fastqt
from benchmarks.measure.baselines import loss_products
from benchmarks.measure.timing import beside_products, in_turns_with
from benchmarks.measure.workloads import embeddings, forward_and_backward, peak_above_gradients

Losses = tuple[Callable[[], Tensor], Callable[[], Tensor], list[Tensor]]  # fastqt's, eager PyTorch's, leaves


def gloss_bow(B: int, V: int, D: int) -> Losses:
    """Each sentence has 12 words."""
    latents, weight = embeddings(B, V, D=D)
    bias = torch.zeros(V, requires_grad=True)
    token_ids = torch.randint(V, (12 * B,), generator=torch.Generator().manual_seed(1))
    offsets = torch.arange(0, 12 * B, 12)

    def eager() -> Tensor:
        named = torch.zeros(B, V)
        named[torch.arange(B).repeat_interleave(12), token_ids] = 1
        logits = latents @ weight.T + bias
        return F.binary_cross_entropy_with_logits(logits, named, reduction="sum") / B

    ours = partial(fastqt.gloss_bow_loss, latents, weight, bias, token_ids, offsets)
    return ours, eager, [latents, weight, bias]


def siglip(N: int, M: int, D: int) -> Losses:
    a, b = embeddings(N, M, D=D)

    def eager() -> Tensor:
        scores = 10 * F.normalize(a) @ F.normalize(b).T - 10
        return -F.logsigmoid((2 * torch.eye(N) - 1) * scores).sum() / N

    return partial(fastqt.siglip_loss, a, b, scale=10.0, bias=-10.0), eager, [a, b]


def simcse(N: int, M: int, D: int) -> Losses:
    z1, z2 = embeddings(N, M, D=D)

    def eager() -> Tensor:
        return F.cross_entropy(20 * F.normalize(z1) @ F.normalize(z2).T, torch.arange(N))

    return partial(fastqt.simcse_loss, z1, z2), eager, [z1, z2]


def clip(N: int, M: int, D: int) -> Losses:
    a, b = embeddings(N, M, D=D)

    def eager() -> Tensor:
        scores, pairs = 20 * F.normalize(a) @ F.normalize(b).T, torch.arange(N)
        return (F.cross_entropy(scores, pairs) + F.cross_entropy(scores.T, pairs)) / 2

    return partial(fastqt.clip_loss, a, b, scale=20.0), eager, [a, b]


def mixcse(N: int, M: int, D: int) -> Losses:
    z1, z2 = embeddings(N, M, D=D)

    def eager() -> Tensor:
        h1, h2 = F.normalize(z1), F.normalize(z2)
        mixed = F.normalize(0.2 * h2 + 0.8 * h2.roll(-1, 0)).detach()
        scores = torch.cat([h1 @ h2.T, (h1 * mixed).sum(1, keepdim=True)], 1)
        return F.cross_entropy(20 * scores, torch.arange(N))

    return partial(fastqt.mixcse_loss, z1, z2), eager, [z1, z2]


def three_block_mixcse(N: int, M: int, D: int) -> Losses:
    z1, z2 = embeddings(N, M, D=D)

    def eager() -> Tensor:
        h1, h2 = F.normalize(z1), F.normalize(z2)
        mixed1, mixed2 = (F.normalize(0.2 * z + 0.8 * z.roll(-1, 0)).detach() for z in (z1, z2))
        before = torch.eye(N).roll(-1, 1).bool()
        blocks = (h1 @ mixed2.T).masked_fill(before, 0), (mixed1 @ h2.T).masked_fill(before.T, 0)
        return F.cross_entropy(20 * torch.cat([h1 @ h2.T, *blocks], 1), torch.arange(N))

    return partial(fastqt.mixcse_loss, z1, z2, form="released"), eager, [z1, z2]


@pytest.mark.parametrize(
    ("call", "make", "N", "M", "D"),
    [
        ("gloss_bow_loss", gloss_bow, 512, 50_000, 300),
        ("siglip_loss", siglip, 4096, 4096, 768),
        ("simcse_loss", simcse, 4096, 4096, 768),
        ("clip_loss", clip, 4096, 4096, 768),
        ("mixcse_loss", mixcse, 4096, 4096, 768),
        ('mixcse_loss(form="released")', three_block_mixcse, 4096, 4096, 768),
        # These are for the memory that normalised rows take. The loss of two views is also MNRL's.
        ("simcse_loss", simcse, 8192, 8192, 768),
        ("clip_loss", clip, 8192, 8192, 768),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_family(benchmark, call, make, N, M, D):
    loss, eager_loss, leaves = make(N, M, D)
    ours, eager = (forward_and_backward(function, *leaves) for function in (loss, eager_loss))
    products = loss_products(*leaves[:2])
    torch.testing.assert_close(loss(), eager_loss())  # they are the same loss

    rounds = 9 if N <= 4096 else 3
    peaks = []
    for run in (ours, eager):
        run()
        peaks.append(peak_above_gradients(run, leaves))

    others = {"gemm": partial(products, *(x.detach() for x in leaves[:2])), "eager": eager}
    median, seconds = in_turns_with(benchmark, ours, others, rounds)

    benchmark.extra_info.update(
        loss=call,
        N=N,
        M=M,
        D=D,
        rounds=rounds,
        **beside_products(median, seconds),
        peak_above_gradients=peaks[0],
        eager_peak_above_gradients=peaks[1],
    )
