"""The C++ of the CPU engine is such that compilers for macOS and Windows take it.

`make ports` installs the PyPI package ziglang, which holds clang with the headers of both systems' C and C++
libraries. It compiles for them here; nothing that it makes is run. Microsoft's own compiler is not to be had
on Linux: of it the tests know only which words its preprocessor would leave to it.

The code uses no name of libtorch that torch 2.11, the oldest one supported, does not have. A newer torch
compiles newer names even where TORCH_TARGET_VERSION asks for 2.11: some are macros that its headers define as
the older name. Only the installed torch is here to compile with, so the names are listed.
"""

from __future__ import annotations

import importlib.util
import re
import runpy
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import setuptools
from torch.utils import cpp_extension

from tests.csrc.building import compiler

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path.relative_to(ROOT) for path in (ROOT / "csrc").rglob("*.cpp"))
GNU = re.compile(
    r"__attribute__|__asm__|__builtin_\w+|#\s*pragma GCC|\b__int128\b|\b__restrict__\b|<sys/|<unistd"
)
TARGETS = {"darwin": "aarch64-macos.11.0", "windows": "x86_64-windows-gnu"}


def setup_flags(monkeypatch: pytest.MonkeyPatch, system: str) -> list[str]:
    """The flags that setup.py gives a compiler on a system, without a build."""
    with monkeypatch.context() as patch:
        patch.setattr(setuptools, "setup", lambda **_: None)
        patch.setenv("FASTQT_PURE", "1")
        patch.chdir(ROOT)
        functions = runpy.run_path(str(ROOT / "setup.py"))
        patch.setattr(sys, "platform", system)
        return functions["cpu_flags"]()


def test_each_system_has_flags_of_its_own_compiler(monkeypatch):
    for system in ("linux", "darwin"):
        assert {"-std=c++20", "-fopenmp-simd"} <= set(setup_flags(monkeypatch, system))
    flags = setup_flags(monkeypatch, "win32")
    assert "/std:c++20" in flags
    assert all(flag.startswith("/") and "openmp" not in flag and "fp:fast" not in flag for flag in flags)


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("system", ["_MSC_VER=1940", "__APPLE__=1"])
def test_no_word_of_gcc_alone_is_left_to_another_compiler(system):
    """Of each file by itself, without the headers that it includes."""
    # Clang has GCC's attributes, but no GNU or Linux headers.
    clang = ["-D__clang__=1", "-D__GNUC__=4", "-D__aarch64__=1"] if "APPLE" in system else ["-D_WIN32=1"]
    words = "<sys/|<unistd" if "APPLE" in system else GNU.pattern
    left = {}
    others = ROOT / "csrc/module.cpp", ROOT / "csrc/glibc.cpp"
    for path in (*sorted((ROOT / "csrc/cpu").iterdir()), *others):
        text = re.sub(r"^#include (.*)$", r"included \1", path.read_text(), flags=re.MULTILINE)
        command = [str(compiler()), "-E", "-P", "-undef", f"-D{system}", *clang, "-x", "c++", "-"]
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
        assert "fastqt" in done.stdout or path.stem in ("module", "glibc"), path
        left[path.name] = re.findall(words, done.stdout)
    assert {name: found for name, found in left.items() if found} == {}


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="no ziglang; make ports installs it")
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
@pytest.mark.parametrize("system", TARGETS)
def test_clang_compiles_it_for(system, source, monkeypatch, tmp_path):
    if system == "windows" and source.name == "module.cpp":
        pytest.skip("it includes Python.h, and this Python's is Linux's")
    # MinGW's compiler for Windows takes the flags of clang elsewhere, not those of Microsoft's.
    flags = setup_flags(monkeypatch, "darwin")
    include = [f"-isystem{path}" for path in (*cpp_extension.include_paths(), sysconfig.get_path("include"))]
    macros = ["-DTORCH_TARGET_VERSION=0x020b000000000000", "-DPy_LIMITED_API=0x030a0000"]
    # Clang does not vectorise every marked loop for the oldest x86-64, nor for arm64.
    warnings = ["-Werror", "-Wno-pass-failed", "-Wno-missing-field-initializers"]
    command = [sys.executable, "-m", "ziglang", "c++", "-target", TARGETS[system], *flags, *warnings, *macros]
    whole = [*command, "-Icsrc", *include, "-c", str(source), "-o", str(tmp_path / "object.o")]
    done = subprocess.run(whole, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    magic = {"darwin": b"\xcf\xfa\xed\xfe", "windows": b"\x64\x86"}[system]
    assert (tmp_path / "object.o").read_bytes().startswith(magic)


NAME = re.compile(
    r"#include <(torch/[^>]+)>"
    r"|\b(aoti_torch_\w+|(?:STABLE|STD|TORCH)_\w+|torch::(?:stable|headeronly)::[\w:]+)"
)


# Each was compiled with torch 2.11.0. Before you add one, build and test with that: the Makefile says how.
OF_TORCH_2_11 = {
    *("STABLE_TORCH_LIBRARY_FRAGMENT", "STABLE_TORCH_LIBRARY_IMPL", "STD_TORCH_CHECK", "TORCH_BOX"),
    *("TORCH_ERROR_CODE_CHECK", "aoti_torch__reinterpret_tensor", "aoti_torch_cpu_addmm_out"),
    *("aoti_torch_device_type_cpu", "aoti_torch_dtype_float32", "aoti_torch_dtype_float64"),
    *("aoti_torch_empty_strided", "aoti_torch_get_current_cuda_stream", "aoti_torch_get_dtype"),
    *("torch/csrc/inductor/aoti_torch/c/shim.h", "torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h"),
    *("torch/csrc/stable/accelerator.h", "torch/csrc/stable/library.h", "torch/csrc/stable/macros.h"),
    *("torch/csrc/stable/ops.h", "torch/csrc/stable/tensor.h", "torch/headeronly/core/ScalarType.h"),
    *("torch/headeronly/util/Exception.h", "torch::headeronly::ScalarType", "torch::headeronly::toString"),
    *("torch::stable::Tensor", "torch::stable::accelerator::DeviceGuard", "torch::stable::contiguous"),
    *("torch::stable::get_num_threads", "torch::stable::new_empty", "torch::stable::parallel_for"),
}


def test_the_names_of_libtorch_are_those_of_the_oldest_torch():
    sources = [path for path in (ROOT / "csrc").rglob("*") if path.suffix in {".h", ".cpp", ".cu", ".cuh"}]
    used = {a or b for path in sources for a, b in NAME.findall(path.read_text())}
    assert used == OF_TORCH_2_11
