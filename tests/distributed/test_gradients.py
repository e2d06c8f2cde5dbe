"""Gradients of parameters, as DDP, FSDP2 or a sum over ranks leave them, are those of one process."""

from __future__ import annotations

import math

import pytest

from tests.shared.models_on_ranks import LOSSES, WRAPPERS, all_factors

TOLERANCE = 1e-5  # of float32, whose sums are in another order


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_gradients_of_all_parameters_have_factor_one(ranks, wrapper, size):
    for found in ranks(size).run(all_factors, list(LOSSES), wrapper):
        assert_factors_are_one(found)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_a_ring_gives_the_same_gradients(ranks, size):
    for found in ranks(size).run(all_factors, ["contrastive", "siglip", "clip", "mixcse"], "ddp", "ring"):
        assert_factors_are_one(found)


def assert_factors_are_one(found):
    for name, parameters in found.items():
        assert "loss.log_scale 1" in parameters
        for parameter, (factor, error) in parameters.items():
            assert math.isclose(factor, 1, rel_tol=TOLERANCE), (name, parameter, factor)
            assert error < TOLERANCE, (name, parameter, error)
