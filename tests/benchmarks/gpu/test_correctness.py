"""What a GPU's results are compared with: exact values in float64, hard inputs, and bounds that bind."""

from functools import partial

import pytest
import torch

from benchmarks.gpu import correctness
from benchmarks.gpu.correctness import Problem
from tests.shared import oracle
from tests.shared.tolerances import FLOAT64, relative

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("N", "M", "offsets", "diagonal"),
    [(9, 9, (-1, 1), "zero"), (7, 12, (0,), "keep"), (12, 7, (0, 2), "keep"), (8, 8, (1,), "zero")],
)
def test_truth_and_eager_equal_the_oracle(N, M, offsets, diagonal):
    problem = Problem("", "random", N, M, 5, offsets, diagonal)
    f, g = (x.double().requires_grad_() for x in correctness.random_inputs(problem, 0))
    T = oracle.window(N, M, list(offsets))
    wanted = oracle.contrastive(f.detach().numpy(), g.detach().numpy(), T, diagonal=diagonal)
    found = correctness.truth(f.detach(), g.detach(), offsets, diagonal)
    rows = correctness.eager_rows(f, g, offsets, diagonal)
    eager = (rows.detach(), *torch.autograd.grad(rows.mean(), (f, g)))
    for a, b, exact in zip(found, eager, (wanted.loss, wanted.queries, wanted.candidates), strict=True):
        assert relative(a, exact) < FLOAT64
        assert relative(b, exact) < FLOAT64


@pytest.mark.parametrize(("noise", "too_much"), [(None, 1e-4), (0.1, 0.1)])
def test_three_block_mixcse_passes_and_a_rougher_one_fails(monkeypatch, noise, too_much):
    right = correctness.fastqt.mixcse_loss

    def rough(*views, error, **options):
        return right(*views, **options) * (1 + error)

    for error in (0.0, too_much):
        monkeypatch.setattr(correctness.fastqt, "mixcse_loss", partial(rough, error=error))
        arguments = 13, 24, noise, torch.float32, "fast", CPU, "triton"
        ok, detail = correctness.three_block_verdict(*arguments)
        assert ok is (error == 0), detail


@pytest.mark.parametrize(
    "problem", [p for p in correctness.PROBLEMS if p.N < 2000], ids=lambda problem: problem.name
)
@pytest.mark.thinned(2)
def test_inputs_are_as_hard_as_their_kind_says(problem):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        f, g = (x.to(dtype) for x in correctness.INPUTS[problem.kind](problem, 0))
        losses, *_ = correctness.truth(f, g, problem.offsets, problem.diagonal)
        correctness.assert_kind(problem, losses)


def test_an_error_beyond_its_bound_fails_and_so_does_nan():
    assert correctness.within({"a": (1.0, 1.0)})[0]
    assert not correctness.within({"a": (0.0, 1.0), "b": (1.1, 1.0)})[0]
    assert not correctness.within({"a": (float("nan"), 1.0)})[0]


def test_an_engine_that_is_less_exact_than_eager_fails(monkeypatch):
    problem, right = (
        Problem("", "random", 20, 20, 8, (1,), "zero", seeds=1),
        correctness.fastqt.contrastive_loss,
    )

    def rough(f, g, targets, *, error=0.0, backend=None, **options):
        return right(f, g, targets, **options) * (1 + error)

    for error in (0.0, 1e-4):
        monkeypatch.setattr(correctness.fastqt, "contrastive_loss", partial(rough, error=error))
        ok, detail = correctness.problem_verdict(problem, torch.float32, "fast", CPU)
        assert ok is (error == 0), detail
