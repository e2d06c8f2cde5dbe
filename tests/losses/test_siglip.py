"""SigLIP's loss equals its definition with the whole matrix of scores, value and gradients."""

import torch
import torch.nn.functional as F

import fastqt
from tests.shared.loss_views import N, by_backend, by_memory, check, cosines, views


@by_backend
@by_memory
def test_is_the_definition(backend, memory):
    a, b = inputs = views(N, N)
    scale = torch.tensor(10.0, dtype=torch.float64, requires_grad=True)
    bias = torch.tensor(-10.0, dtype=torch.float64, requires_grad=True)
    signs = 2 * torch.eye(N, dtype=torch.float64) - 1
    expected = -F.logsigmoid(signs * (scale * cosines(a, b) + bias)).sum() / N
    loss = fastqt.siglip_loss(a, b, scale=scale, bias=bias, backend=backend, memory=memory)
    check(loss, expected, [*inputs, scale, bias])
