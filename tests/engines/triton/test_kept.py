"""Exponentials that are kept from the forward to the backward pass, interpreted: not a bit is another."""

import pytest
import torch

import fastqt
from fastqt.engines.triton import contrastive, operands, softmax

N, M, D = 13, 21, 9


@pytest.fixture
def filled(monkeypatch):
    """Of each launch for scores whether it stores exponentials."""
    stored, genuine = [], softmax.exp_scores

    def exp_scores(*x, exponentials, **how):
        stored.append(exponentials is not None)
        genuine(*x, exponentials=exponentials, **how)

    monkeypatch.setattr(softmax, "exp_scores", exp_scores)
    return stored


def drawn(dtype, spread=1.0):
    generator = torch.Generator().manual_seed(0)
    rows = (spread * torch.randn(n, D, generator=generator) for n in (N, M, 5))
    return [x.to(dtype).requires_grad_() for x in rows]


LOSSES = {
    "sums": lambda q, c, k, **how: fastqt.log_sum_exp(q, c, negatives=k, diagonal="exclude", **how),
    "rows": lambda q, c, k, **how: fastqt.contrastive_loss(
        q, c, fastqt.Window(1), diagonal="zero", negatives=k, reduction="none", **how
    ),
    "biases": lambda q, c, k, **how: fastqt.contrastive_loss(
        q,
        c,
        fastqt.Diagonal(),
        negatives=k,
        diagonal="keep",
        bias=torch.linspace(-1, 1, M),
        reduction="none",
        **how,
    ),
}


def gradients(loss, inputs, **how):
    """Those of two backward passes through one graph, and of an upstream gradient of both signs."""
    rows = loss(*inputs, backend="triton", **how)
    weights = torch.linspace(-1, 2, N)
    return [torch.autograd.grad(rows, inputs, weights, retain_graph=True) for _ in range(2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("normalize", [False, True], ids=["products", "cosines"])
@pytest.mark.parametrize("spread", [1.0, 60.0], ids=["", "overflow"])
@pytest.mark.thinned(6)
def test_change_no_bit_and_serve_every_backward_pass(name, dtype, normalize, spread, monkeypatch):
    """Also where shifts were too far off, and rows are computed again in what is kept."""
    inputs, how = drawn(dtype, spread), {"normalize": normalize, "scale": 20.0 if normalize else 1.0}
    first, again = gradients(LOSSES[name], inputs, **how)
    monkeypatch.setattr(contrastive, "KEPT_BYTES", 0)
    computed_again, _ = gradients(LOSSES[name], inputs, **how)
    for kept, twice, wanted in zip(first, again, computed_again, strict=True):
        assert torch.equal(kept, wanted)
        assert torch.equal(twice, wanted)


def test_serve_chunks_of_rows(monkeypatch):
    """Where only some rows of a gradient's product fit at a time."""
    inputs = drawn(torch.float32)
    whole, _ = gradients(LOSSES["sums"], inputs)
    for name, value in {"ROW_MULTIPLE": 5, "FAST_BYTES": 0}.items():
        monkeypatch.setattr(operands, name, value)
    of_chunks, _ = gradients(LOSSES["sums"], inputs)
    for a, b in zip(of_chunks, whole, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("dtype", "how", "is_kept"),
    [
        (torch.float32, {}, True),
        (torch.bfloat16, {}, True),
        (torch.float16, {}, False),
        (torch.float32, {"memory": "low"}, False),
        (torch.float32, {"memory": 2**25}, False),
    ],
)
def test_save_a_product(dtype, how, is_kept, filled):
    queries, candidates, negatives = drawn(dtype)
    rows = LOSSES["sums"](queries, candidates, negatives, backend="triton", **how)
    assert any(filled) == is_kept
    forward = len(filled)
    rows.sum().backward()
    assert (len(filled) == forward) == is_kept


def test_are_not_kept_without_gradients(filled):
    with torch.no_grad():
        LOSSES["sums"](*drawn(torch.float32), backend="triton")
    assert filled == [False, False]
