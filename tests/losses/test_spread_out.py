"""The spread-out regulariser is the sum over all pairs of rows, from a matrix of columns or of few rows."""

import math

import pytest
import torch
import torch.nn.functional as F

import fastqt
from tests.shared.tolerances import HALF_ULP, UNIT_ROUNDOFF


def with_gradient(function, x, **options):
    x = x.clone().requires_grad_()
    value = function(x, **options)
    return value.detach(), torch.autograd.grad(value, x)[0]


def rows(shape, kind, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(shape, dtype=torch.float64, generator=generator)
    if kind == "random":
        return noise.to(dtype)
    if kind == "alike":
        return (1 + 0.01 * noise).to(dtype)
    # Bases, each orthonormal and turned against the last, which is as spread out as rows can be.
    bases = [
        torch.linalg.qr(torch.randn(shape[1], shape[1], dtype=torch.float64, generator=generator))[0]
        for _ in range(math.ceil(shape[0] / shape[1]))
    ]
    return (torch.cat(bases)[: shape[0]] + 1e-3 * noise).to(dtype)


def eager(x, mean_weight=1.0, second_moment_weight=1.0, hinge=False):
    unit, n = F.normalize(x, dim=1), len(x)
    others = (unit @ unit.T).masked_fill(torch.eye(n, dtype=torch.bool), 0)
    pairs = n * (n - 1)
    return mean_weight * (others.sum() / pairs) ** 2 + second_moment_weight * others.square().sum() / pairs


@pytest.mark.parametrize(
    "weights", [{"mean_weight": 0.0}, {"second_moment_weight": 0.0}], ids=["squares", "mean"]
)
@pytest.mark.parametrize("kind", ["random", "alike", "spread out"])
@pytest.mark.parametrize("shape", [(40, 64), (64, 64), (65, 64), (130, 64), (400, 64)])
def test_float32_loses_what_the_rounding_of_rows_does(shape, kind, weights):
    """Also where rows are as spread out as they can be, and their gradient is nearly 0.

    What one rounding of each element does is found in float64, so it is the same on every machine. A row at
    norm 1 has two: of its norm, and of what is divided by it. The loss adds up in float64, but a gradient is
    a sum in float32, whose n roundings of either sign are together about as large as the root of n.
    """
    roundings = torch.tensor([2.0, math.sqrt(max(shape))])
    ours, of_one_rounding = [], []
    # The rounding error of a single number, the loss, is small or large by chance: its mean needs many draws.
    for seed in range(12):
        x = rows(shape, kind, torch.float32, seed)
        exact = with_gradient(eager, x.double(), **weights)
        noise = 2 * torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) - 1
        computed = with_gradient(fastqt.spread_out_loss, x, hinge=False, **weights)
        rounded = with_gradient(eager, x * (1 + UNIT_ROUNDOFF[torch.float32] * noise), **weights)
        for errors, results in ((ours, computed), (of_one_rounding, rounded)):
            errors.append([float((a - b).norm() / b.norm()) for a, b in zip(results, exact, strict=True)])
    a, b = (torch.tensor(x).mean(0) for x in (ours, of_one_rounding))
    assert (a <= roundings * b + 5 * HALF_ULP[torch.float32]).all(), (a, b)


def test_one_row_has_no_others():
    value, gradient = with_gradient(fastqt.spread_out_loss, torch.randn(1, 5))
    assert value == 0
    assert (gradient == 0).all()


@pytest.mark.parametrize("shape", [(3, 5), (12, 5)])
def test_derivatives(shape):
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(fastqt.spread_out_loss, x)
    assert torch.autograd.gradgradcheck(fastqt.spread_out_loss, x)


X = torch.randn(4, 3)
REFUSED = {
    "both": (X, {"mean_weight": 0, "second_moment_weight": 0.0}, "mean_weight: want a number above 0 where"),
    "text": (X, {"second_moment_weight": "1"}, "second_moment_weight: want a number, got str"),
    "vector": (X[0], {}, r"embeddings: want shape \(rows, D\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_words(name):
    x, options, message = REFUSED[name]
    with pytest.raises((ValueError, TypeError), match=f"^{message}"):
        fastqt.spread_out_loss(x, **options)
    if x is X:
        with pytest.raises((ValueError, TypeError), match=f"^{message}"):
            fastqt.nn.SpreadOutLoss(**options)
