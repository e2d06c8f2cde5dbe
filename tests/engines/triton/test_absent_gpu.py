"""The Python of the GPU path, run on fake CUDA tensors, mixes no devices and never waits for the GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.cpp_extension import include_paths, library_paths

from tests.csrc.building import ROOT, compiler
from tests.engines.triton.absent_gpu import problems

RUN = """
import ctypes, sys
ctypes.CDLL(sys.argv[1])
from tests.engines.triton import absent_gpu
absent_gpu.main()
"""

pytestmark = [
    pytest.mark.skipif(compiler() is None, reason="no C++ compiler"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="wants Linux"),
    pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has a library for CUDA devices"),
]


@pytest.fixture(scope="module")
def errors(tmp_path_factory):
    """The error of each problem by its name, or None. A process of its own finds them."""
    library = tmp_path_factory.mktemp("absent_gpu") / "absent_gpu.so"
    source = Path(__file__).parent / "absent_gpu.cpp"
    paths = [f"-isystem{path}" for path in include_paths()]
    paths += [option for path in library_paths() for option in (f"-L{path}", f"-Wl,-rpath,{path}")]
    flags = ["-std=c++20", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    command = [compiler(), *flags, *paths, source, "-ltorch_cpu", "-lc10", "-o", library]
    subprocess.run(command, check=True)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT / "tests" / "shared")
    run = subprocess.run(
        [sys.executable, "-c", RUN, library],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    found = json.loads(run.stdout)
    assert list(found) == list(problems())
    return found


@pytest.mark.parametrize("name", problems())
def test_nothing_mixes_devices_or_waits(errors, name):
    assert errors[name] is None, errors[name]
