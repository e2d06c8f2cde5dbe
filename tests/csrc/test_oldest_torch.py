"""The C++ code uses no name of libtorch that torch 2.11, the oldest one supported, does not have.

A newer torch compiles newer names even where TORCH_TARGET_VERSION asks for 2.11: some are macros that its
headers define as the older name. Only the installed torch is here to compile with, so the names are listed.
"""

from __future__ import annotations

import re
from pathlib import Path

CSRC = Path(__file__).parents[2] / "csrc"
NAME = re.compile(
    r"#include <(torch/[^>]+)>"
    r"|\b(aoti_torch_\w+|(?:STABLE|STD|TORCH)_\w+|torch::(?:stable|headeronly)::[\w:]+)"
)
# Each was compiled with torch 2.11.0. Before you add one, build and test with that: the Makefile says how.
OF_TORCH_2_11 = {
    "STABLE_TORCH_LIBRARY_FRAGMENT",
    "STABLE_TORCH_LIBRARY_IMPL",
    "STD_TORCH_CHECK",
    "TORCH_BOX",
    "TORCH_ERROR_CODE_CHECK",
    "aoti_torch__reinterpret_tensor",
    "aoti_torch_cpu_addmm_out",
    "aoti_torch_device_type_cpu",
    "aoti_torch_dtype_float32",
    "aoti_torch_dtype_float64",
    "aoti_torch_empty_strided",
    "aoti_torch_get_current_cuda_stream",
    "aoti_torch_get_dtype",
    "torch/csrc/inductor/aoti_torch/c/shim.h",
    "torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h",
    "torch/csrc/stable/accelerator.h",
    "torch/csrc/stable/library.h",
    "torch/csrc/stable/macros.h",
    "torch/csrc/stable/ops.h",
    "torch/csrc/stable/tensor.h",
    "torch/headeronly/core/ScalarType.h",
    "torch/headeronly/util/Exception.h",
    "torch::headeronly::ScalarType",
    "torch::headeronly::toString",
    "torch::stable::Tensor",
    "torch::stable::accelerator::DeviceGuard",
    "torch::stable::contiguous",
    "torch::stable::get_num_threads",
    "torch::stable::new_empty",
    "torch::stable::parallel_for",
}


def test_the_names_of_libtorch_are_those_of_the_oldest_torch():
    sources = [path for path in CSRC.rglob("*") if path.suffix in {".h", ".cpp", ".cu", ".cuh"}]
    used = {a or b for path in sources for a, b in NAME.findall(path.read_text())}
    assert used == OF_TORCH_2_11
