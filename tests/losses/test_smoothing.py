"""Label smoothing is that of F.cross_entropy over the whole matrix of scores, value and gradients."""

import random

import pytest
import torch
import torch.nn.functional as F

import fastqt
from tests.shared.loss_views import K, N, by_backend, by_memory, check, cosines, views
from tests.shared.tolerances import (
    EAGER_FACTOR,
    FLOAT32,
    FLOAT64,
    FOR_DTYPE,
    HALF_ULP,
    REORDERED,
    UNIT_ROUNDOFF,
    relative,
)

by_smoothing = pytest.mark.parametrize("smoothing", [1e-6, 0.1, 1.0])


def cross_entropy(scores, smoothing, reduction="mean"):
    own = torch.arange(len(scores))
    return F.cross_entropy(scores, own, label_smoothing=smoothing, reduction=reduction)


def both_ways(scores, smoothing, reduction="mean"):
    return sum(cross_entropy(s, smoothing, reduction) for s in (scores, scores.T)) / 2


@by_backend
@by_memory
@by_smoothing
def test_of_info_nce(backend, memory, smoothing):
    q, c, negatives = inputs = views(N, N + 3, K)
    scale = torch.tensor(7.0, dtype=torch.float64, requires_grad=True)
    options = {"scale": scale, "label_smoothing": smoothing, "backend": backend, "memory": memory}
    scores = scale * cosines(q, torch.cat([c, negatives]))
    check(
        fastqt.info_nce_loss(q, c, negatives=negatives, **options),
        cross_entropy(scores, smoothing),
        [*inputs, scale],
    )
    raw = fastqt.info_nce_loss(q, c, normalize=False, reduction="sum", **options)
    check(raw, cross_entropy(scale * q @ c.T, smoothing, "sum"), [q, c, scale])


@by_backend
@by_memory
@by_smoothing
def test_of_clip(backend, memory, smoothing):
    a, b = inputs = views(N, N)
    scale = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    options = {"scale": scale, "label_smoothing": smoothing, "backend": backend, "memory": memory}
    check(fastqt.clip_loss(a, b, **options), both_ways(scale * cosines(a, b), smoothing), [*inputs, scale])
    weights = torch.arange(1.0, N + 1, dtype=torch.float64)
    rows = fastqt.clip_loss(a, b, normalize=False, reduction="none", **options)
    check(weights @ rows, weights @ both_ways(scale * a @ b.T, smoothing, "none"), [*inputs, scale])


@pytest.mark.parametrize("seed", range(40))
def test_random_problems(seed):
    """Of any sizes, options and dtypes, and scores of which some rows are certain."""
    draw = random.Random(seed)
    n, width = draw.choice([1, 2, 5, 40]), draw.choice([1, 7, 64])
    clip, normalize = draw.random() < 0.4, draw.random() < 0.5
    dtype, reduction = draw.choice([torch.float64, torch.float32]), draw.choice(["mean", "sum", "none"])
    m, k = (n, 0) if clip else (n + draw.choice([0, 3]), draw.choice([0, 1, 30]))
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(rows, width, generator=generator, dtype=torch.float64) for rows in (n, m, k)]
    if draw.random() < 0.5:
        made[0] = made[1][:n] + 0.01 * made[0]
    inputs = [x.to(dtype).requires_grad_() for x in made if len(x)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    scale, smoothing = draw.choice([0.3, 4.0]), draw.choice([0.01, 0.1, 0.7])
    options = {"scale": scale, "label_smoothing": smoothing, "normalize": normalize, "reduction": reduction}
    options |= {"backend": draw.choice(["cpu", "reference"]), "memory": draw.choice(["fast", "low"])}
    if clip:
        loss = fastqt.clip_loss(*inputs, **options)
    else:
        loss = fastqt.info_nce_loss(*inputs[:2], negatives=inputs[2] if k else None, **options)
    columns = torch.cat(exact[1:])
    scores = scale * (cosines(exact[0], columns) if normalize else exact[0] @ columns.T)
    expected = (both_ways if clip else cross_entropy)(scores, smoothing, reduction)
    if normalize and width == 1:  # Cosines are signs, and all gradients rounding errors.
        assert relative(loss, expected) < FOR_DTYPE[dtype]
    else:
        check(loss, expected, inputs, FOR_DTYPE[dtype], exact)


def test_the_triton_engine_too():
    a, b = (x.detach().float().requires_grad_() for x in views(N, N))
    options = {"scale": 3.0, "label_smoothing": 0.2}
    for loss, of_scores in ((fastqt.info_nce_loss, cross_entropy), (fastqt.clip_loss, both_ways)):
        expected = of_scores(3 * cosines(a, b), 0.2)
        check(loss(a, b, backend="triton", **options), expected, [a, b], FLOAT32)


def test_every_row_has_a_target():
    q, c = views(N, N)
    options = {"scale": 2.0, "label_smoothing": 0.3}
    of_targets, mean = (
        fastqt.info_nce_loss(q, c, reduction=name, **options) for name in ("mean_of_targets", "mean")
    )
    assert relative(of_targets, mean) < FLOAT64


def test_nothing_smoothed_is_the_loss_itself():
    a, b = views(N, N)
    assert torch.equal(fastqt.info_nce_loss(a, b, label_smoothing=0.0), fastqt.info_nce_loss(a, b))
    assert torch.equal(
        fastqt.clip_loss(a, b, scale=2.0, label_smoothing=0), fastqt.clip_loss(a, b, scale=2.0)
    )


@pytest.mark.parametrize("noise", [0.03, 1.0])
@pytest.mark.parametrize("smoothing", [1e-3, 0.2])
@pytest.mark.parametrize("clip", [False, True])
def test_error_is_at_most_eagers(clip, smoothing, noise):
    """This holds also where the two views are nearly equal, and a query is certain of its candidate."""

    def ours(a, b):
        if clip:
            return fastqt.clip_loss(a, b, scale=50.0, label_smoothing=smoothing)
        return fastqt.info_nce_loss(a, b, scale=50.0, label_smoothing=smoothing)

    def eager(a, b):
        return (both_ways if clip else cross_entropy)(50 * cosines(a, b), smoothing)

    errors = {ours: [], eager: []}
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        a = torch.randn(64, 48, generator=generator)
        pair = a, a + noise * torch.randn(64, 48, generator=generator)
        if noise < 1:
            certain = (50 * cosines(*pair)).softmax(1).diagonal()
            assert certain.min() > 0.999
        exact = [x.double().requires_grad_() for x in pair]
        value = eager(*exact)
        wanted = [value.detach(), *torch.autograd.grad(value, exact)]
        for function, found in errors.items():
            inputs = [x.clone().requires_grad_() for x in pair]
            value = function(*inputs)
            results = [value.detach(), *torch.autograd.grad(value, inputs)]
            found.append([float((x - y).norm() / y.norm()) for x, y in zip(results, wanted, strict=True)])
    a, b = (torch.tensor(x).mean(0) for x in errors.values())
    assert (a <= EAGER_FACTOR * b + HALF_ULP[torch.float32]).all(), (a, b)


@pytest.mark.slow
def test_compiled_and_under_autocast():
    inputs = [x.detach().float().requires_grad_() for x in views(N, N, K)]

    def loss(a, b, negatives):
        options = {"scale": 2.0, "label_smoothing": 0.1}
        return fastqt.clip_loss(a, b, **options) + fastqt.info_nce_loss(a, b, negatives=negatives, **options)

    eager = loss(*inputs)
    wanted = torch.autograd.grad(eager, inputs)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")(*inputs)
    for x, y in zip(torch.autograd.grad(compiled, inputs), wanted, strict=True):
        assert relative(x, y) < REORDERED[torch.float32]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = loss(*inputs)
    assert rounded.dtype == torch.float32
    assert abs(rounded - eager) < 2 * 2 * UNIT_ROUNDOFF[torch.bfloat16]  # two losses of scores of at most 2
