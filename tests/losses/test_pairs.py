"""InfoNCE, SimCSE and CLIP with label smoothing or with hard negatives, beside whole matrices of scores."""

import random

import pytest
import torch
import torch.nn.functional as F

import fastqt
from tests.shared.loss_views import N, check, cosines, views
from tests.shared.tolerances import (
    FLOAT32,
    FOR_DTYPE,
    relative,
)


def cross_entropy(scores, smoothing, reduction="mean"):
    own = torch.arange(len(scores))
    return F.cross_entropy(scores, own, label_smoothing=smoothing, reduction=reduction)


def both_ways(scores, smoothing, reduction="mean"):
    return sum(cross_entropy(s, smoothing, reduction) for s in (scores, scores.T)) / 2


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
    scale = draw.choice([0.3, 4.0])
    smoothing = draw.choice([0.01, 0.1, 0.7] if dtype is torch.float32 else [1e-6, 0.1, 1.0])
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


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((N, 0, 5), "z3: want at least one hard negative a sentence"),
        ((N, 2, 4), r"z3\[:, 0\]: want D=5 columns as z1 has, got 4"),
        ((N - 1, 2, 5), r"z3\[:, 0\]: want a row for each of the 9 rows of z1, got 8"),
        ((N, 2, 2, 5), r"z3: want shape \(rows, D\)"),
    ],
)
def test_refuses_hard_negatives_of_another_shape(shape, message):
    z1, z2 = views(N, N)
    with pytest.raises(ValueError, match=message):
        fastqt.simcse_loss(z1, z2, torch.zeros(shape, dtype=torch.float64))
