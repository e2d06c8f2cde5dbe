"""Launches have the precision that torch is set to, also by settings that its older getters raise for."""

import os
import subprocess
import sys

import pytest

from tests.csrc.building import ROOT

# In a process of its own, which does not interpret kernels and in which the older getters may raise.
RUN = """
from unittest import mock
import torch
from tests.shared.launches import GPUS, Case, Launch, described, problem_of
from fastqt import engines, torch_modes
from fastqt.kernels import launch

def precisions(case):
    asked = mock.Mock(wraps=torch_modes.tf32_allowed)
    with torch.device("meta"), mock.patch.object(launch, "tf32_allowed", asked):
        problem, needs = problem_of(case)
        with described(GPUS[1]) as events:
            engines.ENGINES["triton"].computation(problem).forward_with_gradients(problem, 1 / case.N, needs)
    found = [x.constants["PRECISION"] for x in events if isinstance(x, Launch) and "PRECISION" in x.constants]
    assert found
    assert asked.called == (case.dtype == "float32")
    return set(found)

for setting in ("tf32", "ieee"):
    torch.backends.cuda.matmul.fp32_precision = setting
    assert precisions(Case("", "float32")) == {setting}
    assert precisions(Case("", "bfloat16")) == precisions(Case("", "float16")) == {"ieee"}
"""


@pytest.mark.slow
def test_the_new_setting_of_float32_is_read_for_float32_alone():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", RUN], check=True, cwd=ROOT, env=environment)
