"""What the kernels execute is what was stored."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import triton

STORED = Path(__file__).parents[2] / "benchmarks" / "results" / "counters.json"


@pytest.mark.parametrize("arch", [80, pytest.param(90, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "problem", ["softmax, bf16", pytest.param("sigmoid with biases, bf16", marks=pytest.mark.slow)]
)
def test_a_kernel_executes_no_more_for_a_cell_than_it_did(problem, arch):
    """A change that is meant stores new counts: python -m benchmarks.counters --out FILE."""
    stored = json.loads(STORED.read_text())
    if stored["triton"] != triton.__version__:
        pytest.skip(f"the counts are of Triton {stored['triton']}, and this is {triton.__version__}")
    command = [sys.executable, "-m", "benchmarks.counters", "--only", problem, str(arch)]
    counted = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout)
    known = stored["per cell"][problem][f"sm_{arch}"]
    assert counted.keys() == known.keys()
    for kernel, figures in counted.items():
        for name in ("instructions", "special", "tensor", "shared wavefronts", "global sectors"):
            assert figures.get(name, 0) == pytest.approx(known[kernel].get(name, 0), rel=0.02), (kernel, name)
