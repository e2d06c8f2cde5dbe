"""The tile functions of csrc/cpu on emulated processors: tiles of any size give the same gradient."""

import subprocess

import pytest
import torch
from torch.utils.cpp_extension import include_paths

from tests.csrc.cpu import test_sanitizers
from tests.csrc.cpu.processors import OPTIMISED, PROCESSORS

PROBLEMS = "10"


@pytest.mark.slow
@pytest.mark.parametrize("processor", [name for name, each in PROCESSORS.items() if each.emulator])
def test_random_tiles(processor):
    on = PROCESSORS[processor]
    if (reason := on.why_not()) is not None:
        pytest.skip(reason)
    stable = "-DTORCH_TARGET_VERSION=0x020b000000000000"
    flags = (*OPTIMISED, *on.flags, stable, *(f"-isystem{path}" for path in include_paths()))
    program = on.built(
        dict.fromkeys(test_sanitizers.SOURCES, flags),
        headers=("csrc/cpu/*.h",),
        versions=(torch.__version__,),
    )
    run = subprocess.run(on.run(program, PROBLEMS), capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout == f"{PROBLEMS} problems\n"
