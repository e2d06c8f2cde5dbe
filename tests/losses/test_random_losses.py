"""Random calls of the losses of recipes have the values and gradients of their formulas in float64."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fastqt
from tests.shared.draws import Drawn, Seeded
from tests.shared.random_losses import KINDS, Call, random_call

FIXED = settings(derandomize=True, database=None, deadline=None)


@st.composite
def calls(draw) -> Call:
    return random_call(Drawn(draw))


@settings(FIXED, max_examples=150)
@given(calls())
def test_the_value_of_the_formula(call):
    call.check()


@pytest.mark.slow
@settings(FIXED, max_examples=600)
@given(calls())
def test_the_value_of_the_formula_in_more_calls(call):
    call.check()


def test_every_make_occurs():
    makes = {make for number in range(300) for make in random_call(Seeded(number)).makes}
    assert makes >= {*KINDS, "one row expanded", "candidates"}
    assert makes >= {"float64", "float32", "float16", "bfloat16"}


@pytest.mark.parametrize("name", KINDS)
def test_what_is_slightly_wrong_is_found(name):
    """A scale or a score that is wrong by a thousandth, in float64 and float32."""
    found = compared = 0
    for number in range(250):
        call = random_call(Seeded(number))
        if call.makes[0] != name or not {"float64", "float32"} & set(call.makes):
            continue
        right, compared = call.function, compared + 1
        call.function = lambda right=right, **given: 1.001 * right(**given) + 1e-3
        try:
            call.check()
        except AssertionError:
            found += 1
    assert found == compared > 3
    assert right in {getattr(fastqt, public) for public in fastqt.__all__ if public.endswith("_loss")}
