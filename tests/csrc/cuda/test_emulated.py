"""The one-launch kernel's PTX, as nvcc writes it, on the emulator: the oracle's values, and no reports.

tests/csrc/cuda/test_small_kernel.py runs the same source as C++, in which a header of the tests takes the
place of csrc/cuda/device.h. Here that header is executed too: copies, tensor cores, barriers of the grid.
"""

import functools

import numpy as np
import pytest
import torch

from fastqt.engines.cuda import SHARED_BYTES
from tests.csrc.cuda import random_problems
from tests.csrc.cuda.emulated import EmulatedKernel, needs_nvcc
from tests.csrc.cuda.host_execution import ARITHMETICS
from tests.csrc.cuda.test_small_kernel import problem
from tests.emulator.machine import SCHEDULES, StoppedError
from tests.emulator.reports import Reports
from tests.shared import oracle

pytestmark = needs_nvcc
BLOCKS = 3


@functools.cache
def kernel(arithmetic):
    dtype = torch.float32 if arithmetic == "tf32" else getattr(torch, arithmetic)
    return EmulatedKernel(arithmetic, SHARED_BYTES[dtype])


def small(arithmetic="float32", N=20, M=19, D=72, **options):
    """Three steps of the depth and a part of one, which several blocks share."""
    T = oracle.window(N, M, [-1, 1])
    return problem(
        arithmetic, N, M, D, T, queries=0.3, **{"diagonal": "exclude", "row_weights": 1 / N, **options}
    )


def check(p, blocks, **options):
    reports = Reports()
    found = kernel(p.arithmetic).run(p, blocks=blocks, reports=reports, **options)
    assert not len(reports), str(reports)
    errors = random_problems.errors(p, found, random_problems.expected(p))
    assert all(error <= 1 for error in errors.values()), errors


@pytest.mark.slow
def test_the_loss_and_its_gradients():
    check(small(), BLOCKS)


@pytest.mark.slow
@pytest.mark.parametrize("arithmetic", ARITHMETICS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_random_problems_in_every_order(arithmetic, schedule):
    """Widths that are no multiple of a vector, negatives of rows, mixes, weights, all diagonals."""
    for seed in range(ARITHMETICS.index(arithmetic), 8, len(ARITHMETICS)):
        p, blocks = random_problems.make(seed)
        check(p, blocks, schedule=schedule, seed=seed)


@pytest.mark.slow
def test_a_column_that_is_none_ends_the_launch():
    p = small()
    p.columns = np.where(np.arange(p.columns.size) == 2, 19, p.columns)
    with pytest.raises(StoppedError, match="want columns of candidates"):
        kernel("float32").run(p, blocks=BLOCKS, reports=Reports())
