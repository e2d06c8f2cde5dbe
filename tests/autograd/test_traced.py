"""A compiled loss runs on the engine that was asked for; its operators pass opcheck."""

import dataclasses

import pytest
import torch

import fastqt
from fastqt import engines
from fastqt.autograd import traced
from fastqt.problem import Problem
from fastqt.targets import Window
from fastqt.targets.base import TargetRows
from tests.shared.cases import CASES, N
from tests.shared.tolerances import REORDERED, relative

ALL = next(case for case in CASES if case.name == "all at once")
MODES = ({}, {"memory": "low"}, {"memory": 2**25}, {"reduction": "none"}, {"reduction": "sum"})
by_mode = pytest.mark.parametrize("mode", MODES, ids=str)


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


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("needs", [[True] * 7, [True] + [False] * 6, [False] * 7], ids=str)
def test_opcheck_whole_losses(dtype, needs):
    for changes in (
        {},
        {"negatives": None, "row_negatives": None, "mask": torch.eye(9).roll(3, 1).bool()},
        {"link": "sigmoid", "bias": torch.zeros(9, dtype=dtype), "memory": 2**25},
        {"normalize": True, "bias": torch.zeros(9, dtype=dtype)},
        {"row_negatives": None, "row_scores": torch.zeros(9, dtype=dtype)},
    ):
        p = problem(dtype, **changes)
        needed = [need and x is not None for need, x in zip(needs, p.inputs(), strict=True)]
        flat, rows = (*traced.OPERATORS.arguments(p), "cpu"), torch.zeros(9, dtype=torch.float64)
        torch.library.opcheck(torch.ops.fastqt.contrastive_forward, flat)
        weight = torch.tensor(0.5, dtype=torch.float64)
        torch.library.opcheck(torch.ops.fastqt.contrastive_forward_with_gradients, (*flat, weight, needed))
        torch.library.opcheck(
            torch.ops.fastqt.contrastive_backward, (*flat, rows, rows + 1, rows + 1, needed)
        )


@pytest.mark.parametrize("memory", ["low", 2**25])
def test_operators_carry_every_field_of_a_problem(memory):
    """A field that is not listed would have its default value in a compiled loss, without a word."""
    rows, columns = torch.ones(9, dtype=torch.int64), torch.ones(7, dtype=torch.int64)
    targets = TargetRows(*(torch.rand(9) for _ in range(6)), cached=True)
    given = Problem(
        *(torch.rand(9, 3) for _ in range(4)),
        *(torch.tensor(2.0), targets, "exclude", rows, columns, torch.ones(9, 7), memory, rows, 0.5),
        *(torch.rand(7), "sigmoid", True, torch.rand(9), (1, 2), (0.5, 2.0), torch.rand(9)),
    )
    (received,) = traced.OPERATORS.of_arguments(lambda p: [p])(*traced.OPERATORS.arguments(given))
    defaults = {f.name: f.default for f in dataclasses.fields(Problem)}
    for name, default in defaults.items():
        assert getattr(given, name) is not default, f"the test is to give {name} another value"
        assert getattr(received, name) is getattr(given, name) or name == "targets"
    for f in dataclasses.fields(TargetRows):
        assert getattr(received.targets, f.name) is getattr(targets, f.name)


@pytest.fixture
def asked(monkeypatch) -> list[str]:
    """Which engines have been asked to compute."""
    names, genuine = [], engines.Engine.computation
    monkeypatch.setattr(
        engines.Engine, "computation", lambda engine, p: names.append(engine.name) or genuine(engine, p)
    )
    return names


@pytest.mark.parametrize("engine", ["cpu", "triton", "torch"])
@pytest.mark.parametrize("mode", [{}, {"reduction": "none"}], ids=str)
@pytest.mark.thinned(3)
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


@pytest.mark.slow
def test_a_compiled_loss_of_any_batch_size():
    """From the second batch size on, torch.compile takes the size to be a variable."""
    inputs = [torch.randn(N, 4, requires_grad=True) for N in (7, 12, 25)]

    def loss(f):
        return fastqt.contrastive_loss(f, f.roll(1, 0))

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for f in inputs:
        (found,), (expected,) = (torch.autograd.grad(function(f), f) for function in (compiled, loss))
        assert relative(found, expected) < REORDERED[torch.float32]
