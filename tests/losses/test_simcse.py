"""SimCSE's loss, also with hard negatives, equals its definition with the whole matrix of scores."""

import pytest
import torch
import torch.nn.functional as F

import fastqt
from tests.shared.loss_views import N, by_backend, by_memory, check, cosines, views
from tests.shared.tolerances import FLOAT32


@by_backend
@by_memory
@pytest.mark.parametrize("weight", [None, 0.0, 1.5, -2.0, -17.0, -20.0, 90.0, -800.0, 800.0])
def test_is_the_definition(backend, memory, weight):
    z1, z2, z3 = inputs = views(N, N, N)
    scores = 20 * cosines(z1, z2)
    if weight is None:
        expected = F.cross_entropy(scores, torch.arange(N))
        check(fastqt.simcse_loss(z1, z2, backend=backend, memory=memory), expected, inputs[:2])
        return
    hard = 20 * cosines(z1, z3) + weight * torch.eye(N, dtype=torch.float64)
    expected = F.cross_entropy(torch.cat([scores, hard], 1), torch.arange(N))
    loss = fastqt.simcse_loss(z1, z2, z3, hard_negative_weight=weight, backend=backend, memory=memory)
    check(loss, expected, inputs)


@by_backend
@pytest.mark.parametrize("weight", [-800.0, -20.0, -1.0, 2.0, 90.0, 800.0])
def test_a_weighted_loss_keeps_its_digits_in_float32_once_the_views_agree(backend, weight):
    """Compared with float64, where second views are nearly the first ones and outweigh what has no weight."""
    z1, z2, z3 = (z.detach() for z in views(N, N, N))
    inputs = [z.float().requires_grad_() for z in (z1, z1 + 0.1 * z2, z3 - z1)]
    exact = [z.detach().double().requires_grad_() for z in inputs]
    options = {"scale": 40.0, "hard_negative_weight": weight, "backend": backend}
    loss, truth = (fastqt.simcse_loss(*z, **options) for z in (inputs, exact))
    check(loss, truth, inputs, FLOAT32, exact)


@by_backend
@pytest.mark.parametrize("K", [1, 3])
@pytest.mark.parametrize("weight", [0.0, 1.5, -20.0])
def test_several_hard_negatives_are_columns_for_all(backend, K, weight):
    z1, z2, flat = views(N, N, N * K)
    z3 = flat.detach().view(N, K, -1).requires_grad_()
    hard = torch.cat(
        [20 * cosines(z1, z3[:, k]) + weight * torch.eye(N, dtype=torch.float64) for k in range(K)], 1
    )
    expected = F.cross_entropy(torch.cat([20 * cosines(z1, z2), hard], 1), torch.arange(N))
    loss = fastqt.simcse_loss(z1, z2, z3, hard_negative_weight=weight, backend=backend)
    check(loss, expected, [z1, z2, z3])


@by_backend
@pytest.mark.parametrize("strategy", ["absolute", "relative"])
@pytest.mark.parametrize("weight", [0.0, 1.5])
def test_false_negatives_leave_by_their_cosines(backend, weight, strategy):
    """A hard negative is compared without its weight."""
    z1, z2, z3 = inputs = views(N, N, N)
    cosine = torch.cat([cosines(z1, z2), cosines(z1, z3)], 1)
    positive = cosine.diagonal()[:, None]
    most = (positive + (0.12 if strategy == "absolute" else 0.12 * positive.abs())).detach()
    above = (cosine > most) & ~torch.eye(N, 2 * N, dtype=torch.bool)
    assert above[:, :N].any()
    assert above[:, N:].diagonal().any()
    own = torch.eye(N, dtype=torch.float64)
    scores = 20 * cosine + weight * torch.cat([torch.zeros_like(own), own], 1)
    expected = F.cross_entropy(scores.masked_fill(above, -torch.inf), torch.arange(N))
    options = {"false_negative_margin": 0.12, "false_negative_margin_strategy": strategy}
    loss = fastqt.simcse_loss(z1, z2, z3, hard_negative_weight=weight, backend=backend, **options)
    check(loss, expected, inputs)


@pytest.mark.parametrize("weight", [0.0, -1.0])
def test_several_hard_negatives_keep_their_digits_once_all_agree(weight):
    """Compared with float64, where second views are nearly the first ones, and one negative is near."""
    z1, z2, z3, z4 = (z.detach() for z in views(N, N, N, N))
    inputs = [z1.float().requires_grad_(), (z1 + 0.1 * z2).float().requires_grad_()]
    near = torch.stack([z1 + 0.3 * z3, z4 - z1], 1)
    inputs.append(near.float().requires_grad_())
    exact = [z.detach().double().requires_grad_() for z in inputs]
    options = {"hard_negative_weight": weight, "scale": 40.0}
    loss = fastqt.simcse_loss(*inputs, **options)
    columns = [cosines(exact[0], exact[1]), *(cosines(exact[0], z) for z in exact[2].unbind(1))]
    eye = weight * torch.eye(N, dtype=torch.float64)
    logits = torch.cat([40 * columns[0], *(40 * each + eye for each in columns[1:])], 1)
    check(loss, F.cross_entropy(logits, torch.arange(N)), inputs, FLOAT32, exact)


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
