"""SimCSE's loss, also with hard negatives, equals its definition with the whole matrix of scores."""

import pytest
import torch
import torch.nn.functional as F
from loss_views import N, by_backend, by_memory, check, cosines, views

import fastqt


@by_backend
@by_memory
@pytest.mark.parametrize("weight", [None, 0.0, 1.5, -2.0])
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
