"""Builds absent_gpu.cpp, and runs a program in a process that has loaded it before torch."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch.utils.cpp_extension import include_paths, library_paths

from tests.csrc.building import MODULE, ROOT, build, compiler

RUN = """
import ctypes, importlib, sys
ctypes.CDLL(sys.argv[1])
importlib.import_module(sys.argv[2]).main()
"""

marks = [
    pytest.mark.skipif(compiler() is None, reason="no C++ compiler"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="wants Linux"),
    pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has a library for CUDA devices"),
]


def printed_by(module: str, given: str = "") -> str:
    """What `main` of a module prints, with Triton not interpreting, where standard input is what is given."""
    flags = ["-std=c++20", "-Wall", "-Wextra", "-Werror", "-fPIC", *(f"-isystem{x}" for x in include_paths())]
    paths = [option for path in library_paths() for option in (f"-L{path}", f"-Wl,-rpath,{path}")]
    library = build(
        {"tests/engines/triton/absent_gpu.cpp": flags},
        headers=(),
        link=[*MODULE, *paths, "-Wl,--no-as-needed", "-ltorch_cpu", "-lc10"],
        versions=[torch.__version__],
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", RUN, library, module],
        cwd=ROOT,
        env=environment,
        input=given,
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return run.stdout
