"""The loss in autograd: upstream gradients, retained graphs, torch.compile and opcheck."""

import pytest
import torch
from cases import CASES, N
from tolerances import REORDERED, relative

import fastqt
from fastqt import autograd, engines
from fastqt.autograd import times
from fastqt.problem import Problem
from fastqt.targets import Window

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


@pytest.mark.parametrize(
    "mode", [MODES[0], *(pytest.param(mode, marks=pytest.mark.slow) for mode in MODES[1:])], ids=str
)
def test_compiles_into_one_graph(mode):
    document_ids = torch.arange(N) // 4

    def loss(queries, candidates, scale):
        return fastqt.contrastive_loss(
            queries, candidates, document_ids=document_ids, scale=scale, normalize=True, **mode
        ).sum()

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True)
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(N, 8, generator=generator, requires_grad=True) for _ in range(2)]
    inputs.append(torch.tensor(5.0, requires_grad=True))
    a, b = compiled(*inputs), loss(*inputs)
    assert relative(a, b) < REORDERED[torch.float32]
    for x, y in zip(torch.autograd.grad(a * 2, inputs), torch.autograd.grad(b * 2, inputs), strict=True):
        assert relative(x, y) < REORDERED[torch.float32]


def problem(dtype: torch.dtype, **changes: object) -> Problem:
    generator = torch.Generator().manual_seed(0)
    queries, candidates, negatives, row_negatives = (
        torch.randn(n, 4, generator=generator, dtype=dtype) for n in (9, 9, 3, 9)
    )
    fields = {
        "queries": queries,
        "candidates": candidates,
        "negatives": negatives,
        "row_negatives": row_negatives,
        "scale": torch.tensor(2.0),
        "targets": Window().rows(9, 9, torch.device("cpu")),
        "diagonal": "zero",
        "query_groups": None,
        "candidate_groups": None,
        "mask": None,
    }
    return Problem(**{**fields, **changes})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("needs", [[True] * 6, [True] + [False] * 5, [False] * 6], ids=str)
def test_opcheck_whole_losses(dtype, needs):
    for changes in (
        {},
        {"negatives": None, "row_negatives": None, "mask": torch.eye(9).roll(3, 1).bool()},
        {"link": "sigmoid", "bias": torch.zeros(9, dtype=dtype)},
    ):
        p = problem(dtype, **changes)
        inputs = (p.queries, p.candidates, p.negatives, p.row_negatives, p.scale, p.bias)
        needed = [need and x is not None for need, x in zip(needs, inputs, strict=True)]
        flat, rows = (*autograd._flat(p), "cpu"), torch.zeros(9, dtype=torch.float64)
        torch.library.opcheck(torch.ops.fastqt.contrastive_forward, flat)
        torch.library.opcheck(torch.ops.fastqt.contrastive_forward_with_gradients, (*flat, 0.5, needed))
        torch.library.opcheck(
            torch.ops.fastqt.contrastive_backward, (*flat, rows, rows + 1, rows + 1, needed)
        )


@pytest.fixture
def asked(monkeypatch) -> list[str]:
    """Which engines have been asked to compute."""
    names, genuine = [], engines.computation
    monkeypatch.setattr(engines, "computation", lambda name, p: names.append(name) or genuine(name, p))
    return names


@pytest.mark.parametrize("engine", ["cpu", "triton"])
@pytest.mark.parametrize("mode", [{}, {"reduction": "none"}], ids=str)
def test_a_compiled_loss_runs_on_the_engine_that_was_asked_for(engine, mode, asked):
    """In float16 too, which the C++ engine has no kernels for."""
    dtype = torch.float16 if engine == "triton" else torch.float32
    inputs = [torch.randn(9, 4).to(dtype).requires_grad_() for _ in range(2)]

    def loss(f, g):
        return fastqt.contrastive_loss(f, g, backend=engine, **mode).sum()

    expected = torch.autograd.grad(loss(*inputs), inputs)
    asked.clear()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(*inputs), inputs)
    assert set(asked) == {engine}
    for a, b in zip(found, expected, strict=True):
        assert relative(a, b) < REORDERED[torch.float32]


def test_a_compiled_loss_of_any_batch_size():
    """From the second batch size on, torch.compile takes the size to be a variable."""
    inputs = [torch.randn(N, 4, requires_grad=True) for N in (7, 12, 25)]

    def loss(f):
        return fastqt.contrastive_loss(f, f.roll(1, 0))

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for f in inputs:
        (found,), (expected,) = (torch.autograd.grad(function(f), f) for function in (compiled, loss))
        assert relative(found, expected) < REORDERED[torch.float32]
