"""The CPU engine's C++ under the compiler's sanitizers: few problems here, many with `make sanitize`."""

import subprocess
import sys
from pathlib import Path
from shutil import which

import pytest
from torch.utils.cpp_extension import include_paths

ROOT = Path(__file__).parents[3]
SOURCES = (
    *("tests/csrc/cpu/score_tiles.cpp", "csrc/cpu/score_tile.cpp"),
    *("csrc/cpu/clip_tile.cpp", "csrc/cpu/row_passes.cpp"),
)
FLAGS = (
    *("-O1", "-g", "-std=c++20", "-fopenmp-simd", "-fno-sanitize-recover=all"),
    *("-DFASTQT_CLONES=", "-DTORCH_TARGET_VERSION=0x020b000000000000"),
)


@pytest.mark.slow
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_score_tiles(sanitizers, tmp_path, request):
    problems = request.config.getoption("--sanitize-problems")
    if which("g++") is None or not sys.platform.startswith("linux"):
        pytest.skip("wants g++ on Linux")
    program = tmp_path / "score_tiles"
    includes = [f"-isystem{path}" for path in include_paths()]
    command = ["g++", *FLAGS, f"-fsanitize={sanitizers}", "-Icsrc", *includes, *SOURCES, "-o", program]
    subprocess.run(command, cwd=ROOT, check=True)
    run = subprocess.run([program, problems or "20"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
