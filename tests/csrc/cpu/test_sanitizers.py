"""The CPU engine's C++ under the sanitizers of the compiler: few problems here, many with `make sanitize`."""

import subprocess
import sys

import pytest
import torch
from torch.utils.cpp_extension import include_paths

from tests.csrc import building

SOURCES = (
    *("tests/csrc/cpu/score_tiles.cpp", "csrc/cpu/score_tile.cpp"),
    *("csrc/cpu/clip_tile.cpp", "csrc/cpu/row_passes.cpp"),
)
FLAGS = (
    *("-O1", "-g1", "-std=c++20", "-fopenmp-simd", "-fno-sanitize-recover=all"),
    *("-DFASTQT_CLONES=", "-DTORCH_TARGET_VERSION=0x020b000000000000", "-Icsrc"),
)


@pytest.mark.slow
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_random_tiles_under_sanitizers(sanitizers, request):
    problems = request.config.getoption("--sanitize-problems")
    if building.compiler() is None:
        pytest.skip("no C++ compiler")
    if not sys.platform.startswith("linux"):
        pytest.skip("wants Linux")
    sanitize = f"-fsanitize={sanitizers}"
    flags = (*FLAGS, sanitize, *(f"-isystem{path}" for path in include_paths()))
    program = building.build(
        dict.fromkeys(SOURCES, flags),
        headers=("csrc/cpu/*.h",),
        link=(sanitize,),
        versions=(torch.__version__,),
    )
    run = subprocess.run([program, problems or "20"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
