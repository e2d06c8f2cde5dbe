"""The spread-out regulariser is the sum over all pairs of rows, from a matrix of columns or of few rows."""

import math

import pytest
import torch
import torch.nn.functional as F

import fastqt
from tests.shared.tolerances import FLOAT32, FLOAT64, HALF_ULP, UNIT_ROUNDOFF, relative

GEMMA = {"mean_weight": 0.0, "hinge": False}
OPTIONS = {
    "default": {},
    "weights": {"mean_weight": 0.3, "second_moment_weight": 2.5},
    "mean": {"second_moment_weight": 0.0},
    "moment": {"mean_weight": 0.0},
    "of EmbeddingGemma": GEMMA,
    "inner products": {"normalize": False, "hinge": False},
    "inner products with a hinge": {"normalize": False},
}
SHAPES = {
    "few rows": (5, 9),
    "square": (9, 9),
    "one more": (10, 9),
    "many": (61, 9),
    "two": (2, 3),
    "line": (7, 1),
}


def by_pairs(x, mean_weight=1.0, second_moment_weight=1.0, hinge=True, normalize=True):
    """The definition, pair by pair."""
    n, d = x.shape
    unit = [row / row.norm() for row in x] if normalize else list(x)
    scores = torch.stack([unit[i] @ unit[j] for i in range(n) for j in range(n) if i != j])
    moment = (scores**2).sum() / len(scores)
    if hinge:
        moment = torch.clamp(moment - 1 / d, min=0)
    return mean_weight * (scores.sum() / len(scores)) ** 2 + second_moment_weight * moment


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


@pytest.mark.parametrize("kind", ["random", "alike", "spread out"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", OPTIONS)
def test_it_is_the_sum_over_pairs(name, shape, kind):
    x = rows(SHAPES[shape], kind)
    value, gradient = with_gradient(fastqt.spread_out_loss, x, **OPTIONS[name])
    wanted, gradient_wanted = with_gradient(by_pairs, x, **OPTIONS[name])
    assert abs(value - wanted) <= FLOAT64 * max(wanted, 1e-2)
    assert (gradient - gradient_wanted).abs().max() <= FLOAT64 * max(gradient_wanted.abs().max(), 1e-2)


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


@pytest.mark.parametrize("shape", [(3, 5), (12, 5)])
def test_transforms_of_functions(shape):
    x = torch.randn(2, *shape, dtype=torch.float64)
    found = torch.func.vmap(torch.func.grad(fastqt.spread_out_loss))(x)
    for one, gradient in zip(x, found, strict=True):
        assert relative(gradient, with_gradient(fastqt.spread_out_loss, one)[1]) < FLOAT64


@pytest.mark.parametrize("shape", [(3, 5), (3000, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_nothing(shape, dtype):
    x = torch.randn(shape).to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = with_gradient(fastqt.spread_out_loss, x, **OPTIONS["inner products"])
    exact = with_gradient(fastqt.spread_out_loss, x, **OPTIONS["inner products"])
    for a, b in zip(rounded, exact, strict=True):
        assert a.dtype is b.dtype
        assert relative(a, b) < FLOAT32


X = torch.randn(4, 3)
REFUSED = {
    "negative": (X, {"mean_weight": -1.0}, "mean_weight: want a number of at least 0, got -1.0"),
    "both": (X, {"mean_weight": 0, "second_moment_weight": 0.0}, "mean_weight: want a number above 0 where"),
    "text": (X, {"second_moment_weight": "1"}, "second_moment_weight: want a number, got str"),
    "hinge": (X, {"hinge": 1}, "hinge: want True or False"),
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
