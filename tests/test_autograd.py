"""The loss in autograd: upstream gradients, retained graphs, double backward, inference mode."""

import pytest
import torch
from cases import CASES
from tolerances import REORDERED, relative

import fastqt
from fastqt.autograd import times

ALL = next(case for case in CASES if case.name == "all at once")
MODES = ({}, {"memory": "low"}, {"reduction": "none"}, {"reduction": "sum"})
by_mode = pytest.mark.parametrize("mode", MODES, ids=str)


@pytest.mark.parametrize("factor", [1.0, 3.0, -0.5, 0.0])
def test_upstream_scales_the_gradient(factor):
    inputs = ALL.inputs(torch.float64)
    expected = torch.autograd.grad(ALL.loss(inputs, backend="reference") * factor, list(inputs.values()))
    gradients = torch.autograd.grad(ALL.loss(inputs) * factor, list(inputs.values()))
    for a, b in zip(gradients, expected, strict=True):
        assert relative(a, b) < 10 * REORDERED[torch.float64]


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize(
    ("dtype", "upstream"), [(torch.float16, 2.0**16), (torch.bfloat16, 1 / 3), (torch.float64, 0.1)], ids=str
)
def test_times_an_upstream_outside_the_range_of_the_gradients_dtype(dtype, upstream, shape):
    gradient = torch.full(shape, 0.0123, dtype=torch.float64).to(dtype)
    upstream = torch.tensor(upstream)
    expected = (gradient.double() * upstream.double()).to(dtype)
    assert torch.equal(times(gradient, upstream), expected)
    times(gradient, upstream, out=gradient)
    assert torch.equal(gradient, expected)


@by_mode
def test_backward_twice_through_a_retained_graph(mode):
    inputs = ALL.inputs(torch.float64)
    loss = ALL.loss(inputs, **mode).sum()
    first = torch.autograd.grad(loss * 2, list(inputs.values()), retain_graph=True)
    kept = [gradient.clone() for gradient in first]
    second = torch.autograd.grad(loss * 3, list(inputs.values()))
    for a, b, c in zip(first, second, kept, strict=True):
        assert torch.equal(a, c), "the first gradients changed afterwards"
        assert relative(b / 3, a / 2) < REORDERED[torch.float64]


def test_backward_through_a_freed_graph_is_torchs_error():
    inputs = ALL.inputs(torch.float64)
    loss = ALL.loss(inputs)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_input_changed_before_a_recomputing_backward_is_torchs_error():
    inputs = ALL.inputs(torch.float64)
    queries = inputs["queries"] * 1
    loss = ALL.loss({**inputs, "queries": queries}, memory="low")
    queries.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@by_mode
def test_double_backward_is_refused_in_words(mode):
    inputs = CASES[0].inputs(torch.float64)
    loss = CASES[0].loss(inputs, **mode).sum()
    with pytest.raises(RuntimeError, match=r"differentiable once.*reference"):
        torch.autograd.grad(loss, inputs["queries"], create_graph=True)


def test_reference_is_differentiable_twice():
    inputs = CASES[0].inputs(torch.float64)
    assert torch.autograd.gradgradcheck(
        lambda *x: fastqt.contrastive_loss(*x, backend="reference"), tuple(inputs.values())
    )


@pytest.mark.parametrize("upstream", ["expanded", "strided"])
def test_upstream_of_any_stride(upstream):
    inputs = CASES[0].inputs(torch.float64)
    rows = CASES[0].loss(inputs, reduction="none")
    dense = torch.full_like(rows, 0.3) if upstream == "expanded" else torch.randn_like(rows)
    strided = torch.tensor(0.3, dtype=torch.float64).expand(len(rows))
    if upstream == "strided":
        strided = torch.stack([dense, dense], 1)[:, 0]
    a = torch.autograd.grad(rows, inputs["queries"], strided, retain_graph=True)
    b = torch.autograd.grad(rows, inputs["queries"], dense)
    assert relative(a[0], b[0]) < REORDERED[torch.float64]


def test_gradients_accumulate_as_for_any_loss():
    inputs = CASES[0].inputs(torch.float64)
    CASES[0].loss(inputs).backward()
    once = inputs["queries"].grad.clone()
    CASES[0].loss(inputs).backward()
    assert relative(inputs["queries"].grad, 2 * once) < REORDERED[torch.float64]


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients(context):
    inputs = ALL.inputs(torch.float64)
    with context():
        loss = ALL.loss(inputs)
    assert not loss.requires_grad
    assert relative(loss, ALL.loss(inputs)) < REORDERED[torch.float64]


@pytest.mark.parametrize(
    "loss",
    [
        lambda q, c: fastqt.contrastive_loss(q, c, context_size=2, memory="low"),
        lambda q, c: fastqt.curl_block_loss(q, c, context_size=2, negatives="complement"),
    ],
)
def test_training_after_inference_mode(loss, monkeypatch):
    """A tensor cached by a call under inference_mode can be saved for a later backward pass."""
    monkeypatch.setattr("fastqt.targets.window._band_cache", {})
    queries, candidates = torch.randn(9, 4), torch.randn(9, 4)
    with torch.inference_mode():
        loss(queries, candidates)
    leaves = [queries.requires_grad_(), candidates.requires_grad_()]
    loss(*leaves).backward()
    assert all(leaf.grad.isfinite().all() for leaf in leaves)
