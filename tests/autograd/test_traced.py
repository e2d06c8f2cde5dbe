"""A compiled loss runs on the engine that was asked for; its operators pass opcheck."""

import dataclasses

import pytest
import torch

import fastqt
from fastqt import engines
from fastqt.autograd import traced
from fastqt.losses import max_margin, negative_sampling
from fastqt.problem import Problem
from fastqt.targets import Window
from fastqt.targets.base import TargetRows
from tests.shared.tolerances import REORDERED, relative


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


N, M, D, K = 7, 9, 4, 3  # of losses that no engine has


def embeddings(rows: int = N, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(n, D, generator=generator, dtype=torch.float64, requires_grad=True)
        for n in (rows, rows + M - N)
    )


def numbers(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(rows) % M, (torch.arange(rows * K).view(rows, K) * 5) % M


SCALE = torch.tensor(2.0, dtype=torch.float64)


OPERATORS = {
    "negative_sampling": ([SCALE, torch.cat([numbers(N)[0][:, None], numbers(N)[1]], 1)], 3),
    "max_margin of rows": (
        [
            *(SCALE, "float32", torch.arange(N + 1), torch.arange(N), torch.ones(N, dtype=torch.float64)),
            *(None, 0.5, True),
        ],
        3,
    ),
    "max_margin of a matrix": ([SCALE, "float32", None, None, None, torch.eye(N, M), 0.5, False], 3),
}


OPERATOR_OF = {
    "negative_sampling": negative_sampling.NEGATIVE_SAMPLING.operator,
    "max_margin": max_margin.MAX_MARGIN.operator,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("weighted", [False, True])
def test_opcheck_of_walks(name, weighted):
    rest, inputs = OPERATORS[name]
    operator = OPERATOR_OF[name.split()[0]]
    weights = torch.full((N,), 0.5, dtype=torch.float64) if weighted else None
    for needs in ([weighted] * inputs, [weighted] + [False] * (inputs - 1)):
        torch.library.opcheck(operator, (*(x.detach() for x in embeddings()), *rest, weights, needs))


def test_wrong_values_end_a_compiled_loss():
    """The assertion on values has the message of the ValueError, without the sizes of one batch."""

    def call(queries, candidates, positives, negatives):
        return fastqt.negative_sampling_loss(queries, candidates, positives, negatives)

    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    positives, negatives = numbers(N)
    compiled(*embeddings(), positives, negatives)
    for wrong in (M, -1):
        with pytest.raises(RuntimeError, match=r"positives, negatives: want values in 0\.\.last"):
            compiled(*embeddings(), positives, negatives.fill_(wrong))
