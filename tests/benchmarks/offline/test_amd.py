"""The Triton kernels compiled for AMD's GPUs: nothing spills to memory, and blocks fit the LDS."""

import json
import subprocess
import sys

import pytest

from benchmarks.offline.amd import GPUS, RESULTS
from benchmarks.paths import ROOT


def check(specialisations):
    for name, figures in specialisations.items():
        assert figures["scratch"] == 0, name
        assert figures["lds"] <= GPUS[name.split(":")[0]].shared, name
        if figures["kernel"] == "scores_kernel":
            assert figures["matrix_instructions"] > 0, name


def test_what_is_stored_fits():
    specialisations = json.loads(RESULTS.read_text())["specialisations"]
    check(specialisations)
    kernels = {
        arch: {x["kernel"] for name, x in specialisations.items() if name.startswith(arch)} for arch in GPUS
    }
    assert len(kernels["gfx90a"]) > 12
    assert kernels["gfx90a"] == kernels["gfx942"] == kernels["gfx950"]


@pytest.mark.slow
def test_one_launch_of_each_kernel_compiles():
    command = [sys.executable, "-m", "benchmarks.offline.amd", "--quick"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True)
    specialisations = json.loads(done.stdout)["specialisations"]
    check(specialisations)
    stored = json.loads(RESULTS.read_text())["specialisations"].values()
    assert {x["kernel"] for x in specialisations.values()} == {x["kernel"] for x in stored}
