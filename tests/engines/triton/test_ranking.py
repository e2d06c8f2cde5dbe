"""Multiple negatives ranking by the Triton engine, interpreted."""

import math

import pytest
import torch

import fastqt
from tests.shared.pair_oracle import DIRECTIONS, ranking
from tests.shared.tolerances import FLOAT32, TWO_ROUNDINGS, relative

N, D = 18, 16
OPTIONS = {
    "all": {"directions": DIRECTIONS},
    "hard": {"directions": DIRECTIONS, "hardness_mode": "hard_negatives", "hardness_strength": 2.0},
    "in batch": {
        "directions": DIRECTIONS[:2],
        "hardness_mode": "in_batch_negatives",
        "hardness_strength": 2.0,
    },
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("learnt", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.thinned(4)
@pytest.mark.pairwise
def test_is_the_oracles(name, dtype, learnt):
    generator = torch.Generator().manual_seed(0)
    q, d, hard = (torch.randn(N, D, generator=generator) for _ in range(3))
    d = q + 0.02 * d if learnt else d
    given = [x.to(dtype).requires_grad_() for x in (q, d, hard)]
    scale = torch.tensor(20.0 if learnt else 2.5, requires_grad=True)
    weights = torch.linspace(-0.5, 1.5, N)
    loss = fastqt.multiple_negatives_ranking_loss(
        *(given[0], given[1:]),
        scale=scale,
        normalize=True,
        reduction="none",
        backend="triton",
        **OPTIONS[name],
    )
    found = torch.autograd.grad(loss @ weights, [*given, scale])
    queries, *documents = (x.detach().double().numpy() for x in given)
    wanted = ranking(
        *(queries, documents),
        scale=scale.item(),
        normalize=True,
        weights=weights.double().numpy(),
        **OPTIONS[name],
    )
    # In 16 bits the rows of norm 1 are rounded before they are scored, and so are sums of up to five blocks.
    tolerance = FLOAT32 + 4 * TWO_ROUNDINGS[dtype]
    assert relative(loss, wanted.loss) < tolerance
    for a, b in zip(found, (wanted.queries, *wanted.documents, wanted.scale), strict=True):
        assert relative(a.detach(), b) < tolerance


def test_one_row():
    """It has no other rows: a logsumexp of no cells, whose weight is 0."""
    given = [torch.randn(1, D).requires_grad_() for _ in range(2)]
    loss = fastqt.multiple_negatives_ranking_loss(*given, directions=DIRECTIONS, backend="triton")
    assert loss.item() == pytest.approx(math.log(2))  # the positive is there twice
    assert not any(g.any() for g in torch.autograd.grad(loss, given))


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0.0, 1.0])
def test_an_upstream_gradient_of_zero(zero):
    """Where no row or column has a weight, nothing is divided by the largest of them."""
    given = [torch.randn(N, D).requires_grad_() for _ in range(2)]
    loss = fastqt.multiple_negatives_ranking_loss(*given, directions=DIRECTIONS, backend="triton")
    gradients = torch.autograd.grad(zero * loss, given)
    assert all(g.isfinite().all() and (not g.any()) == (not zero) for g in gradients)
