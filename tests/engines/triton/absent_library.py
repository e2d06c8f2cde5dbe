"""Builds absent_gpu.cpp, and runs a program in a process that has loaded it before torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.cpp_extension import include_paths, library_paths

from tests.csrc.building import ROOT, compiler

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


def printed_by(module: str, folder: Path) -> str:
    """What `main` of a module prints, with Triton not interpreting; the library is built into a folder."""
    library = folder / "absent_gpu.so"
    paths = [f"-isystem{path}" for path in include_paths()]
    paths += [option for path in library_paths() for option in (f"-L{path}", f"-Wl,-rpath,{path}")]
    flags = ["-std=c++20", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    source = Path(__file__).parent / "absent_gpu.cpp"
    command = [compiler(), *flags, *paths, source, "-ltorch_cpu", "-lc10", "-o", library]
    subprocess.run(command, check=True)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT / "tests" / "shared")
    run = subprocess.run(
        [sys.executable, "-c", RUN, library, module],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return run.stdout
