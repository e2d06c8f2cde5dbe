"""Builds the extension with sanitizers and a model of AMX, and is the plugin that pytest runs on it with.

The plugin is used as `python -m pytest -p tests.csrc.sanitized`, with the library in FASTQT_TEST_LIBRARY.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from tests.csrc import building

LIBRARY = "FASTQT_TEST_LIBRARY"
# ThreadSanitizer knows nothing of the barriers of OpenMP, which torch is compiled with. Its build has a
# parallel_for of its own.
THREADS = "tests/csrc/cpu/threads.cpp"
QUIET = ("--capture=sys",)  # pytest would keep what a sanitizer writes before it ends the process
FIXED_ADDRESSES = ("setarch", "-R")  # ThreadSanitizer has no room for some of the addresses chosen at random
# With the tiles of AMX as arrays, on every processor. These are headers that take the place of those in csrc.
TILES = "tests/csrc/cpu/tile_model"
LIBRARIES = ("-ltorch", "-ltorch_cpu", "-lc10")


def extension(sanitizers: str) -> Path:
    """The extension without CUDA code, built with -fsanitize=`sanitizers`."""
    import torch
    from torch.utils import cpp_extension

    sources = sorted(str(path.relative_to(building.ROOT)) for path in building.ROOT.glob("csrc/**/*.cpp"))
    if sanitizers == "thread":
        sources.append(THREADS)
    sanitize = (f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")
    includes = (*cpp_extension.include_paths(), sysconfig.get_path("include"))
    flags = (
        *("-O1", "-g1", "-std=c++20", "-fPIC", "-fvisibility=hidden", "-fopenmp-simd", "-DFASTQT_CLONES="),
        *("-DTORCH_TARGET_VERSION=0x020b000000000000", "-DPy_LIMITED_API=0x030a0000"),
        *(f"-I{TILES}", "-Icsrc"),
        *(*sanitize, *(f"-isystem{path}" for path in includes)),
    )
    if sanitizers == "thread":  # which misjudges the variables of threads, if a library is loaded late
        flags += ("-ftls-model=initial-exec",)
    libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
    return building.build(
        dict.fromkeys(sources, flags),
        headers=("csrc/cpu/*.h", f"{TILES}/cpu/*.h"),
        link=(*building.MODULE, *sanitize, *libraries, "-Wl,-Bsymbolic-functions,--no-as-needed", *LIBRARIES),
        versions=(torch.__version__,),
    )


def run(sanitizers: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs pytest with these arguments on the extension that is built with `sanitizers`."""
    runtime = "tsan" if sanitizers == "thread" else "asan"
    # The sanitizer replaces functions of the C++ library when it starts, which must be loaded by then.
    preloaded = [_runtime(f"lib{runtime}.so"), _runtime("libstdc++.so.6")]
    environment = {
        **os.environ,
        LIBRARY: str(extension(sanitizers)),
        "LD_PRELOAD": " ".join(preloaded),
        # Python and torch keep memory until the process ends.
        "ASAN_OPTIONS": "detect_leaks=0:strict_init_order=1:detect_stack_use_after_return=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "TSAN_OPTIONS": f"halt_on_error=1:suppressions={building.ROOT / 'tests/csrc/cpu/tsan.supp'}",
        "OMP_NUM_THREADS": "1",
        "FASTQT_CPU_PRODUCTS": "own",  # with the tiles of the model
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.csrc.sanitized",
        "-n",
        "0",
        "-q",
        *QUIET,
        *arguments,
    ]
    if (
        sanitizers == "thread"
        and subprocess.run([*FIXED_ADDRESSES, "true"], capture_output=True).returncode == 0
    ):
        command = [*FIXED_ADDRESSES, *command]
    return subprocess.run(command, cwd=building.ROOT, env=environment, capture_output=True, text=True)


def _runtime(name: str) -> str:
    command = [str(building.compiler()), f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def pytest_sessionstart() -> None:
    """Loads the library in the place of fastqt._C, and fails where the tests would run without it."""
    import torch  # noqa: F401 - the library links to its libraries

    path = Path(os.environ[LIBRARY])
    sys.modules["fastqt._C"] = building.imported("fastqt._C", path)
    from fastqt.engines import ops

    assert ops.native_error is None, ops.native_error
    maps = Path("/proc/self/maps").read_text()
    assert str(path) in maps
    assert "libasan" in maps or "libtsan" in maps
    assert "/_C.abi3.so" not in maps
