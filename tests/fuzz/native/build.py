"""Builds the fuzzers of csrc/cpu: its sources under AddressSanitizer and UBSan, linked to torch."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from torch.utils import cpp_extension

from tests.csrc import building

TARGETS = ("loss", "clip", "three_block", "gru")
CLANGS = ("clang++-19", "clang++-18", "clang++-17", "clang++-16", "clang++-15", "clang++-14", "clang++")
SANITIZE = ("-fno-sanitize-recover=all", "-fno-sanitize=vptr,function", "-fno-omit-frame-pointer")


def compiler() -> str | None:
    """The clang whose libFuzzer is used, where there is one."""
    return next((path for name in CLANGS if (path := shutil.which(name))), None)


def fuzzer(target: str) -> Path:
    if compiler() is None:
        raise SystemExit(
            "tests.fuzz.native: want a clang++ with libFuzzer, such as Debian's clang-19, found none"
        )

    includes = (f"-isystem{path}" for path in cpp_extension.include_paths())
    flags = ("-O1", "-g1", "-std=c++20", "-DFASTQT_CLONES=", "-Icsrc", *includes)
    stable = "-DTORCH_TARGET_VERSION=0x020b000000000000"  # as in setup.py; the harness uses all of torch
    operators = sorted(str(path.relative_to(building.ROOT)) for path in building.ROOT.glob("csrc/cpu/*.cpp"))
    instrumented = (*flags, "-fsanitize=fuzzer-no-link,address,undefined", *SANITIZE, stable, "-fopenmp-simd")
    harness = (*flags, "-fsanitize=address,undefined", *SANITIZE)

    libraries = (
        part for path in cpp_extension.library_paths() for part in (f"-L{path}", f"-Wl,-rpath,{path}")
    )

    return building.build(
        {f"tests/fuzz/native/{target}.cpp": harness, **dict.fromkeys(operators, instrumented)},
        headers=("csrc/cpu/*.h", "tests/fuzz/native/*.h"),
        link=(
            "-fsanitize=fuzzer,address,undefined",
            *SANITIZE,
            *libraries,
            "-Wl,--no-as-needed",
            "-ltorch",
            "-ltorch_cpu",
            "-lc10",
        ),
        versions=(torch.__version__,),
        command=compiler(),
    )
