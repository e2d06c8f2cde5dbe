"""Random problems: the loss and its gradients are the oracle's up to rounding errors, or a clean error.

The problems are the same in every run, because a test that fails by chance tells nobody what broke.
"""

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, seed, settings

import fastqt
from fastqt.engines import filtered
from fastqt.engines.cpu import contrastive
from fastqt.functional import row_cells
from tests.shared.draws import Seeded
from tests.shared.problem_check import check
from tests.shared.problems import ALL_DTYPES, DTYPES, Maker, Problem, problems

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
        *("several row negatives", "row scores", "euclidean", "prefixes", "margin", "ids"),
        *(f"layout {name}" for name in ("sliced", "spread", "transposed", "one row expanded")),
        *(f"{link}, {dtype}" for link in ("softmax", "sigmoid") for dtype in ("float16", "float64")),
    }


# What losses may have beside rows and targets, which few of the problems above have.
MAKES = ("guide", "ids", "margin", "euclidean", "prefixes", "several row negatives", "row scores")


@cache
def with_make(
    make: str, dtypes: tuple[torch.dtype, ...], count: int, without: tuple[str, ...] = ()
) -> list[Problem]:
    """The first problems that have something particular and are valid."""
    drawn = (Maker(Seeded(number), dtypes).problem for number in range(5000, 9000))
    found = (x for x in drawn if make in x.makes and not x.refusals and not set(without) & set(x.makes))
    return [problem for problem, _ in zip(found, range(count), strict=False)]


def check_with(make: str, backend: str, *drawn: Any) -> int:
    """How many of such problems an engine takes, which are the oracle's, also in several chunks."""
    with pytest.MonkeyPatch.context() as patched:
        for name, value in {"ROOM": {"cpu": (0, 0)}, "MIN_ROWS": 4, "MIN_COLUMNS": 3}.items():
            patched.setattr(filtered, name, value)
        patched.setattr(row_cells, "CPU_CHUNK_BYTES", 200)
        patched.setattr(contrastive, "CHUNK_BYTES", 2000)
        patched.setattr(contrastive, "MIN_CHUNK_ROWS", 1)
        return sum(check(problem, backend) for problem in with_make(make, *drawn))


@pytest.mark.parametrize("backend", ["cpu", "torch", "reference"])
@pytest.mark.parametrize("make", MAKES)
@pytest.mark.thinned(3)
def test_each_engine_meets_each_make(make, backend):
    # Beside one row negative the CPU engine has no prefixes.
    assert check_with(make, backend, ALL_DTYPES, 80) > (20 if make == "prefixes" else 70)


@pytest.mark.parametrize("count", [1, pytest.param(12, marks=pytest.mark.slow)])
@pytest.mark.parametrize("make", [make for make in MAKES if make != "prefixes"])
def test_the_triton_engine_meets_each_make(make, count):
    assert check_with(make, "triton", tuple(DTYPES), count, ("prefixes",)) > 0.6 * count


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
@seed(1)
@settings(AS_DRAWN, derandomize=False, max_examples=60)
@given(problems(DTYPES))
def test_the_triton_engine_in_more_problems(problem):
    check(problem, "triton")
