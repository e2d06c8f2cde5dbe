"""The one-launch kernel's PTX, as nvcc writes it, on the emulator: the oracle's values, and no reports.

tests/csrc/cuda/test_small_kernel.py runs the same source as C++, in which a header of the tests takes the
place of csrc/cuda/device.h. Here that header is executed too: copies, tensor cores, barriers of the grid.
"""

import functools
import re

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


def kernel(arithmetic, edit=None):
    dtype = torch.float32 if arithmetic == "tf32" else getattr(torch, arithmetic)
    return EmulatedKernel(arithmetic, SHARED_BYTES[dtype], edit)


@functools.cache
def unchanged(arithmetic):
    return kernel(arithmetic)


def small(arithmetic="float32", N=20, M=19, D=72, **options):
    """Three steps of the depth and a part of one, which several blocks share."""
    T = oracle.window(N, M, [-1, 1])
    return problem(
        arithmetic, N, M, D, T, queries=0.3, **{"diagonal": "exclude", "row_weights": 1 / N, **options}
    )


def check(kernel, p, blocks, **options):
    reports = Reports()
    found = kernel.run(p, blocks=blocks, reports=reports, **options)
    assert not len(reports), str(reports)
    errors = random_problems.errors(p, found, random_problems.expected(p))
    assert all(error <= 1 for error in errors.values()), errors


@pytest.mark.slow
def test_the_loss_and_its_gradients():
    check(unchanged("float32"), small(), BLOCKS)


@pytest.mark.slow
@pytest.mark.parametrize("arithmetic", ARITHMETICS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_random_problems_in_every_order(arithmetic, schedule):
    """Widths that are no multiple of a vector, negatives of rows, mixes, weights, all diagonals."""
    for seed in range(ARITHMETICS.index(arithmetic), 8, len(ARITHMETICS)):
        p, blocks = random_problems.make(seed)
        check(unchanged(arithmetic), p, blocks, schedule=schedule, seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize("arithmetic", ["float32", "bfloat16"])
def test_blocks_that_see_stores_late(arithmetic):
    check(unchanged(arithmetic), small(arithmetic), BLOCKS, late=True)


def without(pattern, instead=""):
    """An edit of PTX: the first of what a pattern finds is replaced."""
    return lambda ptx: re.sub(pattern, instead, ptx, count=1)


FAULTS = {
    "a step does not wait for the others": (without(r"bar\.sync[^;]*;"), "race"),
    "a copy is waited for too late": (
        without(r"cp\.async\.wait_group 2;", "cp.async.wait_group 3;"),
        "pending",
    ),
    "a store is beyond its matrix": (
        without(r"(st\.global\S*\s+\[%rd\d+)(\+\d+)?\]", r"\1+1048576]"),
        "bounds",
    ),
    "blocks do not release their scores": (without(r"atom\.add\.release", "atom.add.relaxed"), "race"),
    "blocks do not acquire the others' scores": (without(r"ld\.acquire\.gpu", "ld.relaxed.gpu"), "race"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("edit", "wanted"), FAULTS.values(), ids=FAULTS)
def test_what_is_planted_is_found(edit, wanted):
    reports = Reports()
    kernel("float32", edit).run(small(), blocks=BLOCKS, reports=reports)
    assert wanted in reports.kinds(), str(reports)


@pytest.mark.slow
def test_a_column_that_is_none_ends_the_launch():
    p = small()
    p.columns = np.where(np.arange(p.columns.size) == 2, 19, p.columns)
    with pytest.raises(StoppedError, match="want columns of candidates"):
        unchanged("float32").run(p, blocks=BLOCKS, reports=Reports())
