"""Properties of the sigmoid loss that the shared cases of test_contrastive_loss.py do not cover."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fastqt
from tests.shared import oracle
from tests.shared.tolerances import EAGER_FACTOR, FLOAT64, HALF_ULP, REORDERED, relative

N, D = 96, 48
by_memory = pytest.mark.parametrize("memory", ["fast", "low"])


def pairs(seed: int, score: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries whose own candidate scores `score` and whose other candidates score about 0."""
    candidates = F.normalize(torch.randn(N, D, generator=torch.Generator().manual_seed(seed)), dim=1)
    return score * candidates, candidates.clone()


@by_memory
@pytest.mark.parametrize("score", [1.0, 20.0, 60.0])
def test_error_is_at_most_eagers(score, memory):
    """With the bias -score / 2, a pair of score 60 has a probability of 1 - 1e-13."""
    ours, eagers = [], []
    for seed in range(5):
        queries, candidates = pairs(seed, score)
        exact = oracle.contrastive(
            *(queries.double().numpy(), candidates.double().numpy(), np.eye(N)),
            diagonal="keep",
            link="sigmoid",
            bias=-score / 2,
        )
        inputs = (queries.requires_grad_(), candidates.requires_grad_())
        options = {"bias": -score / 2, "memory": memory}
        rows = fastqt.sigmoid_loss(*inputs, fastqt.Diagonal(), reduction="none", **options)
        mean = fastqt.sigmoid_loss(*inputs, fastqt.Diagonal(), **options)
        eager = F.binary_cross_entropy_with_logits(
            queries @ candidates.T - score / 2, torch.eye(N), reduction="none"
        ).sum(1)
        for found, r, m in ((ours, rows, mean), (eagers, eager, eager.mean())):
            results = zip(
                (r.detach(), *torch.autograd.grad(m, inputs)),
                (exact.loss, exact.queries, exact.candidates),
                strict=True,
            )
            found.append([np.linalg.norm(a.double().numpy() - b) / np.linalg.norm(b) for a, b in results])
    bound = EAGER_FACTOR * np.mean(eagers, axis=0) + HALF_ULP[torch.float32]
    assert (np.mean(ours, axis=0) <= bound).all(), (np.mean(ours, axis=0), np.mean(eagers, axis=0))


@pytest.mark.parametrize("score", [20.0, 60.0])
@pytest.mark.parametrize("backend", ["cpu", "torch", "reference"])
def test_a_found_pair_has_its_small_gradient(backend, score):
    """1 - P of a positive is computed from its score: as a difference of P from 1 it would be lost."""
    query = torch.tensor([[score]], requires_grad=True)
    loss = fastqt.sigmoid_loss(query, torch.ones(1, 1), fastqt.Diagonal(), diagonal="keep", backend=backend)
    (found,) = torch.autograd.grad(loss, query)
    assert float(found) == pytest.approx(-math.exp(-score), rel=1e-6)


@by_memory
def test_one_bias_for_all_candidates(memory):
    queries, candidates = (torch.randn(7, 5, dtype=torch.float64) for _ in range(2))
    one = torch.tensor(-1.5, dtype=torch.float64, requires_grad=True)
    each = torch.full((7,), -1.5, dtype=torch.float64, requires_grad=True)
    number = fastqt.sigmoid_loss(queries, candidates, bias=-1.5, memory=memory)
    losses = [fastqt.sigmoid_loss(queries, candidates, bias=bias, memory=memory) for bias in (one, each)]
    for loss in losses:
        assert relative(loss, number) < FLOAT64
        loss.backward()
    assert relative(one.grad, each.grad.sum()) < FLOAT64


@by_memory
def test_sees_nan_and_infinity(memory):
    queries, candidates = torch.randn(7, 5), torch.randn(7, 5)
    queries[2, 3] = torch.nan
    assert fastqt.sigmoid_loss(queries, candidates, memory=memory).isnan()
    rows = fastqt.sigmoid_loss(queries, candidates, memory=memory, reduction="none")
    assert rows.isnan().nonzero().tolist() == [[2]]
    infinite = fastqt.sigmoid_loss(torch.full((1, 1), 1e30), torch.full((1, 1), 1e30), torch.zeros(1, 1))
    assert infinite == torch.inf


@pytest.mark.slow
@by_memory
def test_compiles_into_one_graph(memory):
    def loss(queries, candidates, scale, bias):
        return fastqt.sigmoid_loss(queries, candidates, scale=scale, bias=bias, normalize=True, memory=memory)

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True)
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(9, 8, generator=generator, requires_grad=True) for _ in range(2)]
    inputs += [torch.tensor(5.0, requires_grad=True), torch.tensor(-2.0, requires_grad=True)]
    a, b = compiled(*inputs), loss(*inputs)
    assert relative(a, b) < REORDERED[torch.float32]
    for x, y in zip(torch.autograd.grad(a * 2, inputs), torch.autograd.grad(b * 2, inputs), strict=True):
        assert relative(x, y) < REORDERED[torch.float32]


REFUSED = {
    "bias nan": ({"bias": float("nan")}, ValueError, "bias: want a finite number, got nan"),
    "bias text": (
        {"bias": "0"},
        TypeError,
        r"bias: want a number or a tensor of shape \(\) or \(6,\), .* str",
    ),
    "bias for others": ({"bias": torch.zeros(5)}, ValueError, r"bias: .* shape \(\) or \(6,\), .* \(5,\)"),
    "bias of integers": (
        {"bias": torch.zeros(6).long()},
        ValueError,
        r"bias: .* floating point .* \(6,\), dtype torch.int64",
    ),
    "bias without values": ({"bias": torch.zeros(6, device="meta")}, ValueError, "bias: .* with values"),
    "target on the diagonal": (
        {"targets": fastqt.Diagonal(), "diagonal": "exclude"},
        ValueError,
        "use diagonal='keep'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name):
    arguments, kind, message = REFUSED[name]
    with pytest.raises(kind, match=message):
        fastqt.sigmoid_loss(torch.randn(6, 4), torch.randn(6, 4), **arguments)
