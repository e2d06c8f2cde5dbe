"""A margin that spares a row's own negatives: they stay for their own query, and may leave for others."""

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


@pytest.mark.parametrize("weight", [0.0, 0.7])
@pytest.mark.parametrize("several", [False, True])
def test_hard_negatives_of_simcse(weight, several):
    z3 = drawn(3, N, K, D) if several else drawn(3, N, D)

    def loss(a, b, c, exclude=SPARED):
        how = {"scale": SCALE, "hard_negative_weight": weight, "reduction": "none"}
        return fastqt.simcse_loss(a, b, c, exclude=exclude, **how)

    def oracle(a, b, c):
        a, b, *sets = unit(a, b, *c.view(N, -1, D).unbind(1))
        positive, others = (a * b).sum(1), ~torch.eye(N, dtype=torch.bool)
        cells = [below(a @ x.T, positive)[others].view(N, N - 1) for x in (b, *sets)]
        own = [(SCALE * (a * x).sum(1) + weight)[:, None] for x in sets]
        return softmax(SCALE * positive, [*cells, *own])

    embeddings = drawn(1, N, D), drawn(2, N, D), z3
    spared = check(loss, oracle, *embeddings)
    assert not torch.allclose(spared, loss(*embeddings, exclude=fastqt.Margin(MARGIN)))


@pytest.mark.parametrize(
    "directions", [("query_to_doc",), ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")]
)
def test_hard_negatives_of_ranking(directions):
    def loss(q, p, first, second, exclude=SPARED):
        how = {"scale": SCALE, "directions": directions, "reduction": "none"}
        loss = fastqt.multiple_negatives_ranking_loss
        return loss(q, [p, first, second], exclude=exclude, **how)

    def oracle(q, p, *sets):
        q, p, *sets = unit(q, p, *sets)
        positive, others = (q * p).sum(1), ~torch.eye(N, dtype=torch.bool)

        def off(a, b):
            return below(a @ b.T, positive)[others].view(N, N - 1)

        cells = [off(q, x) for x in (p, *sets)] + [SCALE * (q * x).sum(1)[:, None] for x in sets]
        if len(directions) > 1:
            # The positive is among the scores of documents and queries once more.
            cells += [off(q, q), off(p, q), SCALE * positive[:, None], *(off(p, x) for x in (p, *sets))]
        return softmax(SCALE * positive, cells)

    embeddings = [drawn(seed, N, D) for seed in range(1, 5)]
    spared = check(loss, oracle, *embeddings)
    assert not torch.allclose(spared, loss(*embeddings, exclude=fastqt.Margin(MARGIN)))


def test_prefixes():
    q, c, r = drawn(1, N, D), drawn(2, N, D), drawn(3, N, D)
    how = {"diagonal": "keep", "normalize": True, "exclude": SPARED}

    def loss(dim, **more):
        rows = (x[:, :dim] for x in (q, c))
        return fastqt.contrastive_loss(*rows, fastqt.Diagonal(), row_negatives=r[:, :dim], **how, **more)

    torch.testing.assert_close(loss(D, matryoshka=[2, D]), loss(2) + loss(D), **CLOSE)
