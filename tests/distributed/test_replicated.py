"""Losses that are one number of a whole batch have the value and gradients of one process over any ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.shared.replicated_losses import CASES, compare
from tests.shared.tolerances import FLOAT64, UNIT_ROUNDOFF

each = pytest.mark.parametrize("name", CASES)
# A sum over ranks in another order, and what a learnt batch leaves of it.
TOLERANCE = {torch.float64: FLOAT64, torch.float32: 3e-6}


def check(ranks, case, tolerance=None):
    found = ranks(len(case.counts)).run(compare, case)
    for rank, (value, errors) in enumerate(found):
        assert max(errors.values()) < (tolerance or TOLERANCE[case.dtype]), f"rank {rank}: {errors}"
        assert torch.equal(value, found[0][0]), "the value has other bits on other ranks"


@each
def test_uneven_shards(ranks, name):
    check(ranks, replace(CASES[name], counts=(6, 0, 17)))
    check(ranks, replace(CASES[name], counts=(6, 0, 17), group={"gradients": "sum"}))


@each
def test_equal_shards(ranks, name):
    check(ranks, replace(CASES[name], counts=(9, 9, 9)))
    check(ranks, replace(CASES[name], counts=(9, 9, 9), dtype=torch.float32))


@each
def test_learnt_batches(ranks, name):
    check(ranks, replace(CASES[name], counts=(6, 4, 17), converged=True), 1e2 * FLOAT64)


@each
def test_bfloat16(ranks, name):
    """Both sides round their gradients once."""
    case = replace(CASES[name], counts=(6, 0, 17), dtype=torch.bfloat16)
    check(ranks, case, 3 * UNIT_ROUNDOFF[torch.bfloat16])


@pytest.mark.slow
@pytest.mark.parametrize(
    "counts", [(7,), (9, 4), (1, 1), (0, 5, 6), (8, 8), (5, 1, 7, 2), (4,) * 4, (3, 0, 0, 20)]
)
@each
def test_other_numbers_of_ranks(ranks, name, counts):
    check(ranks, replace(CASES[name], counts=counts))


@each
def test_ranks_that_compare_each_call(ranks, name):
    check(ranks, replace(CASES[name], counts=(6, 17), group={"check": "always"}))
