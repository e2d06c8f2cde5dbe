"""Other orders of summation agree, whatever they are, and results that are wrong do not."""

from functools import partial

import numpy as np
import pytest
import torch

import fastqt
from benchmarks.gpu import agreement
from benchmarks.gpu.agreement import Sums, agree

LOSSES = {
    "rows": (fastqt.contrastive_loss, lambda N, D: agreement.of_rows(N)),
    "clip": (partial(fastqt.clip_loss, scale=20.0), lambda N, D: agreement.of_unit_rows(N)),
    "three blocks": (partial(fastqt.mixcse_loss, form="released"), agreement.of_three_blocks),
}
by_loss = pytest.mark.parametrize("name", LOSSES)


def inputs(N, D, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(N, D, generator=generator) / D**0.25).to(dtype).requires_grad_() for _ in range(2)]


def step(name, leaves, backend="triton"):
    loss = LOSSES[name][0](*leaves, backend=backend)
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def cut_off(x):
    """float64 numbers less what float32 has no room for, as additions on tensor cores may leave it out."""
    rounded = x.astype(np.float32)
    return np.where(np.abs(rounded) > np.abs(x), np.nextafter(rounded, np.float32(0)), rounded)


def summed(terms, splits, block):
    """Sums (K, n) -> (n,) of float32: `splits` parts, each of blocks one after the other."""
    total = np.zeros(terms.shape[1], np.float32)
    for part in np.array_split(terms, splits):
        own = np.zeros_like(total)
        for start in range(0, len(part), block):
            own = cut_off(own + part[start : start + block].astype(np.float64).sum(0))
        total = cut_off(total.astype(np.float64) + own)
    return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_orders_of_summation_agree(dtype):
    """Equal signs lose the most when additions cut off; sums are rounded to the dtype as gradients are."""
    K = 4096
    terms = np.random.default_rng(0).random((K, 300), np.float32)
    loss = torch.ones(())
    found = [torch.from_numpy(summed(terms, *way)).to(dtype) for way in ((1, 1), (1, 16), (4, 16), (7, 64))]
    for other in found[1:]:
        right, details = agree([loss, other], [loss, found[0]], Sums(K))
        assert right, details
    assert any(not torch.equal(other, found[0]) for other in found[1:])


@by_loss
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_wrong_results_do_not_agree(name, dtype):
    """Old inputs, a row that was not written, a chunk that was added twice, and NaN; a loss that is off."""
    N, D = 256, 32
    sums = LOSSES[name][1](N, D)
    wanted = [x.to(dtype) if x.dim() else x.float() for x in step(name, inputs(N, D), "reference")]
    assert agree(wanted, wanted, sums)[0]
    for place in (1, 2):

        def changed(change, place=place):
            found = [x.clone() for x in wanted]
            change(found[place])
            return agree(found, wanted, sums)[0]

        assert not changed(lambda x: x.copy_(x.flip(0)))
        assert not changed(lambda x: x[7].zero_())
        assert not changed(lambda x: x[: N // 8].mul_(2))
        assert not changed(lambda x: x[3, 5].fill_(torch.nan))
    assert not agree([wanted[0] * (1 + 1e-3), *wanted[1:]], wanted, sums)[0]
    assert not agree([wanted[0] * torch.nan, *wanted[1:]], wanted, sums)[0]


def test_a_loss_of_our_own_scores_is_bitwise_equal():
    gradient, loss = torch.ones(3, 2), torch.tensor(8.0)
    found = [torch.nextafter(loss, torch.tensor(9.0)), gradient]
    assert not agree(found, [loss, gradient], Sums(100))[0]
    assert agree(found, [loss, gradient], Sums(100, scores=1e-6))[0]
