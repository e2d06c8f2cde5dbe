"""InfoNCE, SimCSE, CLIP and SigLIP equal their definitions with whole matrices, value and gradients."""

import pytest
import torch
import torch.nn.functional as F
from loss_views import K, N, by_backend, by_memory, check, cosines, views

import fastqt


@by_backend
@by_memory
def test_info_nce(backend, memory):
    q, c, negatives = inputs = views(N, N + 3, K)
    scale = torch.tensor(7.0, dtype=torch.float64, requires_grad=True)
    expected = F.cross_entropy(scale * cosines(q, torch.cat([c, negatives])), torch.arange(N))
    loss = fastqt.info_nce_loss(q, c, scale=scale, negatives=negatives, backend=backend, memory=memory)
    check(loss, expected, [*inputs, scale])
    raw = fastqt.info_nce_loss(q, c, scale=2.0, normalize=False, backend=backend, memory=memory)
    check(raw, F.cross_entropy(2 * q @ c.T, torch.arange(N)), inputs[:2])


@by_backend
@by_memory
@pytest.mark.parametrize("weight", [None, 0.0, 1.5, -2.0])
def test_simcse(backend, memory, weight):
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
@by_memory
@pytest.mark.parametrize("normalize", [True, False])
def test_clip(backend, memory, normalize):
    a, b = inputs = views(N, N)
    scale = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    scores = scale * (cosines(a, b) if normalize else a @ b.T)
    own = torch.arange(N)
    expected = (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2
    loss = fastqt.clip_loss(a, b, scale=scale, normalize=normalize, backend=backend, memory=memory)
    check(loss, expected, [*inputs, scale])


@by_backend
@by_memory
def test_siglip(backend, memory):
    a, b = inputs = views(N, N)
    scale = torch.tensor(10.0, dtype=torch.float64, requires_grad=True)
    bias = torch.tensor(-10.0, dtype=torch.float64, requires_grad=True)
    signs = 2 * torch.eye(N, dtype=torch.float64) - 1
    expected = -F.logsigmoid(signs * (scale * cosines(a, b) + bias)).sum() / N
    loss = fastqt.siglip_loss(a, b, scale=scale, bias=bias, backend=backend, memory=memory)
    check(loss, expected, [*inputs, scale, bias])
