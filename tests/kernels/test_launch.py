"""Where kernels are imported from, and what is launched and compiled: precisions, elements, sizes."""

import json
import os
import subprocess
import sys

import pytest

from fastqt.kernels.launch import elements_of_program
from tests.csrc.building import ROOT
from tests.shared.processes import printed

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
    printed("-c", RUN)


def compiled(*sizes):
    lines = printed("-m", "tests.shared.specialisations", *map(str, sizes)).splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.slow
def test_a_batch_of_another_size_is_not_compiled_for():
    first, *others, odd, another_odd = compiled(1024, 512, 768, 256, 1008, 333, 777)
    assert sorted(first) == ["gradient_kernel", "row_shifts_kernel", "row_stats_kernel", "scores_kernel"]
    # Tiles that are not whole are masked, in code of its own.
    assert others == [[], [], [], ["scores_kernel"]]
    # Rows of an odd length begin at any address.
    assert odd == ["scores_kernel", "row_stats_kernel"]
    assert another_odd == []


@pytest.mark.parametrize("most", [1024, 2048])
@pytest.mark.parametrize("n", [1, 16, 32, 33, 64, 100, 128, 2400])
def test_programs_have_an_element_for_each_thread(n, most):
    program = elements_of_program(n, most, 8)
    assert 32 * program["num_warps"] <= program["BLOCK"]
    assert min(n, most) <= program["BLOCK"] <= max(most, 32)
    assert program["num_warps"] <= 8


@pytest.mark.slow
def test_transformers_passes_over_the_folder():
    """It looks for a package named kernels, and from the root of the checkout it finds this folder."""
    pytest.importorskip("transformers", reason="the extra hf is not installed")
    # The models are imported when they are first asked for, and with them the package that is looked for.
    code = "import transformers; transformers.BertModel; import fastqt.kernels.scores"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", code]  # with -c the working directory is the first place to look
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_only_one_place_holds_the_kernels():
    """A folder fastqt/kernels in the checkout, left over from a build, would hide the one at the root."""
    import fastqt.kernels

    assert list(fastqt.kernels.__path__) == [str(ROOT / "kernels")]
