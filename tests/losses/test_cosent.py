"""The losses that rank pairs by their labels are the sum over all pairs of pairs, by one sort."""

import math

import pytest
import torch

import fastqt
from tests.shared.tolerances import FLOAT64, HALF_ULP, relative

N, D = 23, 6
LABELS = {
    "some equal": torch.arange(N) * 7 % 5,
    "all different": torch.randperm(N, generator=torch.Generator().manual_seed(1)).double() / 7,
    "two": torch.arange(N) % 2 == 0,
    "one apart": torch.arange(N) == 4,
    "float16": (torch.arange(N) * 3 % 4).half() / 4,
    "uint8": (torch.arange(N) * 3 % 4 + 250).byte(),
    "that float64 does not tell apart": torch.arange(N) % 3 + 2**60,
    "below 0": -(torch.arange(N) * 7 % 5) - 3,
    "infinite": torch.tensor([-math.inf, 0.0, math.inf])[torch.arange(N) % 3],
}


def by_pairs(scores: list[float], labels: list[float]) -> tuple[float, list[float]]:
    """The loss and its gradients, pair by pair in Python's floats."""
    higher = [(i, j) for i, x in enumerate(labels) for j, y in enumerate(labels) if x > y]
    terms = {(i, j): scores[j] - scores[i] for i, j in higher}
    most = max([0.0, *terms.values()])
    cells = {pair: math.exp(x - most) for pair, x in terms.items()}
    total = math.fsum(cells.values())
    loss = math.log1p(total) if most == 0 else most + math.log(math.exp(-most) + total)
    whole = math.exp(-most) + total
    gradients = [
        math.fsum(x * ((k == j) - (k == i)) / whole for (i, j), x in cells.items() if k in (i, j))
        for k in range(len(scores))
    ]
    return loss, gradients


SCORES = {
    "random": lambda labels, noise: 3 * noise,
    "converged": lambda labels, noise: 9 * order(labels) + noise,
    "learnt": lambda labels, noise: 60 * order(labels) + noise,
    "hopeless": lambda labels, noise: -400 * order(labels) + noise,
    "equal": lambda labels, noise: 0 * noise,
    "of one large and one small": lambda labels, noise: 1e4 * (order(labels) % 2) + noise,
}


def order(labels: torch.Tensor) -> torch.Tensor:
    """The place of each label among the different ones, float64."""
    return labels.unique(return_inverse=True)[1].double()


@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize("name", LABELS)
def test_it_is_the_sum_over_pairs(name, kind):
    labels = LABELS[name]
    noise = torch.randn(N, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    scores = SCORES[kind](labels, noise).requires_grad_()
    loss = fastqt.lsep_loss(scores, labels)
    (gradient,) = torch.autograd.grad(loss, scores)
    value, gradients = by_pairs(scores.tolist(), labels.tolist())
    assert relative(loss, value) < FLOAT64
    # A score of 1e4 leaves 1e-12 of an exponential.
    assert relative(gradient, gradients) < (1e2 if "large" in kind or kind == "hopeless" else 1) * FLOAT64


@pytest.mark.parametrize("kind", ["random", "converged", "learnt", "hopeless"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scores_of_few_bits_lose_nothing(dtype, kind):
    """The result is that of the given scores in float64, rounded once."""
    labels = LABELS["some equal"]
    noise = torch.randn(N, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    scores = SCORES[kind](labels, noise).to(dtype).requires_grad_()
    loss = fastqt.lsep_loss(scores, labels, scale=1.5)
    (gradient,) = torch.autograd.grad(loss, scores)
    value, gradients = by_pairs([1.5 * x for x in scores.tolist()], labels.tolist())
    assert loss.dtype is torch.float32
    assert relative(loss, value) <= HALF_ULP[torch.float32]
    rounded = 1.5 * torch.tensor(gradients, dtype=torch.float64)
    assert gradient.dtype is dtype
    assert relative(gradient, rounded.to(dtype)) < torch.finfo(dtype).eps


@pytest.mark.parametrize("loss", [fastqt.cosent_loss, fastqt.angle_loss])
def test_a_row_of_zeros_has_a_cosine_of_0(loss):
    a, b = torch.randn(2, N, D, dtype=torch.float64)
    labels = LABELS["some equal"]
    b[3] = 0
    near = b.clone()
    near[3] = torch.tensor([1e-30] + [0] * (D - 1))
    inputs = a.requires_grad_(), b.requires_grad_()
    value = loss(*inputs, labels)
    assert relative(value, loss(a, near, labels)) < FLOAT64
    assert all(x.isfinite().all() for x in torch.autograd.grad(value, inputs))


A, B, L = torch.randn(4, 3), torch.randn(4, 3), torch.arange(4)
REFUSED = {
    "too few labels": (fastqt.cosent_loss, (A, B, L[:3]), {}, r"labels: want shape \(4,\), .* got \(3,\)"),
    "a column of labels": (fastqt.angle_loss, (A, B, L[:, None]), {}, r"labels: .* \(4, 1\); .* flatten\(\)"),
    "NaN": (fastqt.cosent_loss, (A, B, L * math.nan), {}, "labels: want numbers, got NaN"),
    "complex labels": (fastqt.cosent_loss, (A, B, L * 1j), {}, "labels: want numbers of an integer or"),
    "a list": (fastqt.cosent_loss, (A, B, [0, 1, 2, 3]), {}, "labels: want a tensor, got list"),
    "other pairs": (fastqt.cosent_loss, (A, B[:3], L), {}, "b: want a row for each of the 4 rows of a"),
    "matrix": (fastqt.lsep_loss, (A @ B.T, L), {}, r"scores: want shape \(N,\), got \(4, 4\); give one"),
    "integers": (fastqt.lsep_loss, (L, L), {}, "scores: want a floating-point dtype"),
    "another device": (fastqt.lsep_loss, (A[:, 0], L.to("meta")), {}, "labels: want a tensor with values"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_words(name):
    function, arguments, options, message = REFUSED[name]
    with pytest.raises((ValueError, TypeError), match=f"^{message}"):
        function(*arguments, **options)
