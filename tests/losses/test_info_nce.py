"""InfoNCE equals its definition with the whole matrix of scores, value and gradients."""

import torch
import torch.nn.functional as F

import fastqt
from tests.shared.loss_views import K, N, by_backend, by_memory, check, cosines, views


@by_backend
@by_memory
def test_is_the_definition(backend, memory):
    q, c, negatives = inputs = views(N, N + 3, K)
    scale = torch.tensor(7.0, dtype=torch.float64, requires_grad=True)
    expected = F.cross_entropy(scale * cosines(q, torch.cat([c, negatives])), torch.arange(N))
    loss = fastqt.info_nce_loss(q, c, scale=scale, negatives=negatives, backend=backend, memory=memory)
    check(loss, expected, [*inputs, scale])
    raw = fastqt.info_nce_loss(q, c, scale=2.0, normalize=False, backend=backend, memory=memory)
    check(raw, F.cross_entropy(2 * q @ c.T, torch.arange(N)), inputs[:2])
