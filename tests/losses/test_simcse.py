"""SimCSE's loss, also with hard negatives, equals its definition with the whole matrix of scores."""

import pytest
import torch
import torch.nn.functional as F
from loss_views import N, by_backend, by_memory, check, cosines, views
from tolerances import FLOAT32

import fastqt


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
