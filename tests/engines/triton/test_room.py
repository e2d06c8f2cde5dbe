"""Beside gradients the engine allocates what `memory` stands for, at sizes at which that matters."""

import json
import os
import subprocess
import sys

import pytest

from tests.csrc.building import ROOT
from tests.engines.triton.room import LOSSES, MANY_COLUMNS, MEMORY, SHAPES, name_of

MOST = {"fast": 10**9, "low": 64 * 10**6}


@pytest.fixture(scope="module")
def found():
    """The most bytes of each problem, and those of its gradients."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.engines.triton.room"]
    run = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(run.stdout)


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.slow
def test_peak_beside_gradients(found, loss, shape, memory):
    N, _ = shape
    most, of_gradients = found[name_of(loss, *shape, memory)]
    # Statistics of rows and lists of targets, which are a few numbers a row, come on top of the buffers.
    allowed = MOST[memory] if isinstance(memory, str) else 1.03 * memory + 150 * N
    assert most - of_gradients <= allowed


@pytest.mark.slow
def test_the_loss_alone_of_many_columns_keeps_the_sums_of_few_rows(found):
    most, _ = found[MANY_COLUMNS.name]
    assert most <= MOST["low"]
