"""A margin that spares a row's own negatives, of the general losses; test_exclude.py has those of pairs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fastqt
from tests.shared.tolerances import FLOAT64

N, D, K, MARGIN, SCALE = 9, 5, 3, -0.3, 6.0
CLOSE = {"rtol": 1e3 * FLOAT64, "atol": 1e3 * FLOAT64}
SPARED = fastqt.Margin(MARGIN, spare_own_negatives=True)


def drawn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def unit(*embeddings):
    return [F.normalize(x, dim=-1) for x in embeddings]


def softmax(positive, cells):
    return torch.cat([positive[:, None], *cells], 1).logsumexp(1) - positive


def below(similarities, positive):
    """Scores, and minus infinity where the similarity is above the positive's and the margin."""
    leave = similarities.detach() > positive.detach()[:, None] + MARGIN
    return (SCALE * similarities).masked_fill(leave, -torch.inf)


def check(loss, oracle, *embeddings):
    mine, theirs = ([x.clone().requires_grad_() for x in embeddings] for _ in range(2))
    value, wanted = loss(*mine), oracle(*theirs)
    torch.testing.assert_close(value, wanted, **CLOSE)
    upstream = torch.linspace(0.5, 1.5, N, dtype=torch.float64)
    gradients = torch.autograd.grad(value, mine, upstream), torch.autograd.grad(wanted, theirs, upstream)
    torch.testing.assert_close(*gradients, **CLOSE)
    return value


@pytest.mark.parametrize("backend", ["cpu", "torch", "reference"])
@pytest.mark.parametrize("several", [False, True])
def test_row_negatives(backend, several):
    rows = drawn(3, N, K, D) if several else drawn(3, N, D)

    def loss(q, c, r, exclude=SPARED):
        how = {"diagonal": "keep", "scale": SCALE, "normalize": True, "reduction": "none", "backend": backend}
        return fastqt.contrastive_loss(q, c, fastqt.Diagonal(), row_negatives=r, exclude=exclude, **how)

    def oracle(q, c, r):
        q, c, r = unit(q, c, r)
        positive = (q * c).sum(1)
        others = ~torch.eye(N, dtype=torch.bool)
        cells = below(q @ c.T, positive)[others].view(N, N - 1)
        return softmax(SCALE * positive, [cells, SCALE * (r.view(N, -1, D) @ q[:, :, None]).squeeze(2)])

    embeddings = drawn(1, N, D), drawn(2, N, D), rows
    spared = check(loss, oracle, *embeddings)
    assert not torch.allclose(spared, loss(*embeddings, exclude=fastqt.Margin(MARGIN)))
