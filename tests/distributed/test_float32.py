"""Ranks whose devices have no float64, and rings of engines that know no other columns than their own."""

from __future__ import annotations

from fastqt import engines
from tests.shared.float32_ranks import errors, errors_of_a_ring_of_kernels

FEW_ROUNDINGS = 5e-6  # of float32, in sums of some dozen terms
# A ring's target has 1 - P from the whole row's logsumexp: of a number near 20, with a loss near 1e-4.
OF_A_RING = 5e-3


def test_ranks_without_float64(ranks):
    for found in ranks(2).run(errors):
        for case, error in found:
            assert error < (OF_A_RING if case == "info_nce_loss ring converged" else FEW_ROUNDINGS), case


def test_a_ring_of_softmaxes_takes_an_engine_that_knows_whole_rows(ranks):
    for found in ranks(2).run(errors_of_a_ring_of_kernels):
        assert max(found) < FEW_ROUNDINGS


def test_engines_say_whether_they_take_columns():
    for engine in engines.ENGINES.values():
        assert engine.takes_columns == hasattr(engine.module, "backward_of_columns"), engine.name
