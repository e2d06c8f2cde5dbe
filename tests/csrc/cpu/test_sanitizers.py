"""The CPU engine's C++ under the sanitizers of the compiler: a sample here, and more with `make sanitize`.

First its tiles in a program that does not need torch, and then the whole extension in the tests of Python.
"""

import re
import subprocess
import sys

import pytest
import torch
from torch.utils.cpp_extension import include_paths

from tests.csrc import building, sanitized

SOURCES = (
    *("tests/csrc/cpu/score_tiles.cpp", "tests/csrc/cpu/threads.cpp"),
    *("csrc/cpu/score_tile.cpp", "csrc/cpu/clip_tile.cpp", "csrc/cpu/row_passes.cpp"),
)
FLAGS = (
    *("-O1", "-g1", "-std=c++20", "-fopenmp-simd", "-fno-sanitize-recover=all"),
    *("-DFASTQT_CLONES=", "-DTORCH_TARGET_VERSION=0x020b000000000000", "-Icsrc"),
)


OPERATORS = (
    "tests/csrc/cpu/test_operators.py",
    "tests/csrc/cpu/test_products.py",
    "tests/nn/gru/test_native.py",
)
LOSSES = (
    *("tests/engines/cpu/test_contrastive.py", "tests/engines/test_clip_rectangles.py"),
    *("tests/engines/test_three_block.py", "tests/functional/test_random_problems.py"),
    "tests/losses/test_clip.py",
    *("tests/losses/test_mixcse.py", "tests/losses/test_pairs.py"),
)
# Why a test of these is skipped on a processor without the instructions.
OF_THE_PROCESSOR = (
    "this processor multiplies no matrices of bfloat16",
    "there is no micro-kernel for this processor",
    "nothing here is multiplied by the own products",
    "nothing here packs matrices",
)
# The sanitized build does not vectorise. Its sums have other rounding errors, and the same results.
SAME = "not triton and not compile and not opcheck and not at_most_eagers"


@pytest.mark.slow
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_the_extension_under_sanitizers(sanitizers, request):
    if building.compiler() is None:
        pytest.skip("no C++ compiler")
    if not sys.platform.startswith("linux"):
        pytest.skip("wants Linux")
    files = OPERATORS
    if request.config.getoption("--sanitize-problems"):
        files += LOSSES
        if sanitizers != "thread":  # which takes minutes for these
            files += ("tests/functional", "tests/nn/gru/test_gru.py", "tests/losses")
    run = sanitized.run(sanitizers, *files, "-k", SAME, "-rs")
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout
    # A processor may lack instructions. Nothing is skipped because the extension could not be loaded.
    skipped = re.findall(r"^SKIPPED .*", run.stdout, re.MULTILINE)
    assert all(reason.endswith(OF_THE_PROCESSOR) for reason in skipped), skipped


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
