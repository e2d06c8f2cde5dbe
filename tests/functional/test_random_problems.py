"""Random problems: the loss and its gradients are the oracle's up to rounding errors, or a clean error.

The problems are the same in every run, because a test that fails by chance tells nobody what broke.
"""

import pytest
import torch
from hypothesis import Phase, given, seed, settings

import fastqt
from tests.shared.draws import Seeded
from tests.shared.problem_check import check
from tests.shared.problems import DTYPES, Maker, problems

FIXED = settings(derandomize=True, database=None, deadline=None)
AS_DRAWN = settings(FIXED, phases=(Phase.explicit, Phase.generate))  # shrinking takes minutes here


@settings(FIXED, max_examples=400)
@given(problems())
def test_the_oracles_value_or_a_clean_error(problem):
    check(problem)


def test_most_problems_are_valid_and_every_make_occurs():
    """What is refused compares nothing."""
    drawn = [Maker(Seeded(number)).problem for number in range(600)]
    assert sum(not problem.refusals for problem in drawn) > 0.6 * len(drawn)
    makes = {make for problem in drawn if not problem.refusals for make in problem.makes}
    assert makes >= {
        *("autocast", "converged", "normalize", "bias", "mask", "groups", "negatives", "smoothed", "guide"),
        *("several row negatives", "row scores", "euclidean", "prefixes", "margin"),
        *(f"layout {name}" for name in ("sliced", "spread", "transposed", "one row expanded")),
        *(f"{link}, {dtype}" for link in ("softmax", "sigmoid") for dtype in ("float16", "float64")),
    }


WRONG = {
    "value": lambda loss, queries: loss * (1 + 1e-4) + 1e-4,
    "gradient": lambda loss, queries: loss + 1e-3 * (queries - queries.detach()).sum(),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_slightly_wrong_is_found(what, monkeypatch):
    drawn = [Maker(Seeded(number), [torch.float32]).problem for number in range(80)]
    drawn = [problem for problem in drawn if "queries" in problem.needs and not problem.refusals]
    for name in ("contrastive_loss", "sigmoid_loss"):
        loss = getattr(fastqt, name)
        spoil = lambda *, loss=loss, **arguments: WRONG[what](loss(**arguments), arguments["queries"])  # noqa: E731
        monkeypatch.setattr(fastqt, name, spoil)
    found = 0
    for problem in drawn:
        try:
            check(problem)
        except AssertionError:
            found += 1
    assert found > 0.6 * len(drawn)  # the others have scores so large that nothing is left of the digits


@settings(AS_DRAWN, max_examples=4)
@given(problems(DTYPES))
def test_the_triton_engine_in_some_problems(problem):
    check(problem, "triton")


@pytest.mark.slow
@settings(AS_DRAWN, max_examples=20)
@given(problems(DTYPES))
def test_the_triton_engine_too(problem):
    check(problem, "triton")


@pytest.mark.slow
@seed(1)
@settings(AS_DRAWN, derandomize=False, max_examples=60)
@given(problems(DTYPES))
def test_the_triton_engine_in_more_problems(problem):
    check(problem, "triton")
