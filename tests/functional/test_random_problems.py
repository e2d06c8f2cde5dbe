"""Random problems: the loss and its gradients are the oracle's up to rounding errors, or a clean error.

The problems are the same in every run, because a test that fails by chance tells nobody what broke.
"""

import pytest
from hypothesis import Phase, given, seed, settings
from problems import DTYPES, check, problems

FIXED = settings(derandomize=True, database=None, deadline=None)
AS_DRAWN = settings(FIXED, phases=(Phase.explicit, Phase.generate))  # shrinking takes minutes here


@settings(FIXED, max_examples=400)
@given(problems())
def test_the_oracles_value_or_a_clean_error(problem):
    check(*problem)


@settings(AS_DRAWN, max_examples=20)
@given(problems(DTYPES))
def test_the_triton_engine_too(problem):
    link, arguments = problem
    check(link, {**arguments, "backend": "triton"})


@pytest.mark.slow
@seed(1)
@settings(AS_DRAWN, derandomize=False, max_examples=60)
@given(problems(DTYPES))
def test_the_triton_engine_in_more_problems(problem):
    link, arguments = problem
    check(link, {**arguments, "backend": "triton"})
