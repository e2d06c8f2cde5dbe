"""The extension under sanitizers of the compiler, in tests of Python: a sample, more with `make sanitize`."""

import re
import sys

import pytest

from tests.csrc import building, sanitized

OPERATORS = (
    *("tests/csrc/cpu/test_operators.py", "tests/csrc/cpu/test_any_arguments.py"),
    "tests/csrc/cpu/test_products.py",
    *("tests/nn/gru/test_native.py", "tests/engines/cpu/test_contrastive.py"),
    "tests/nn/test_bags.py",
    "tests/optim/test_adam.py",
)
LOSSES = (
    *("tests/engines/test_clip_rectangles.py", "tests/engines/test_three_block.py"),
    "tests/functional/test_random_problems.py",
    "tests/losses/test_clip.py",
    *("tests/losses/test_mixcse.py", "tests/losses/test_pairs.py"),
)
# Why a test of these is skipped on a processor without the instructions.
OF_THE_PROCESSOR = (
    "this processor multiplies no matrices of bfloat16",
    "this processor has no tiles",
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
    if request.config.getoption("--sanitize-losses"):
        files += LOSSES
        if sanitizers != "thread":  # which takes minutes for these
            files += ("tests/functional", "tests/nn/gru/test_gru.py", "tests/losses")
    run = sanitized.run(sanitizers, *files, "-k", SAME, "-rs")
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout
    # A processor may lack instructions. Nothing is skipped because the extension could not be loaded.
    skipped = re.findall(r"^SKIPPED .*", run.stdout, re.MULTILINE)
    assert all(reason.endswith(OF_THE_PROCESSOR) for reason in skipped), skipped
