"""What this machine and this build compute with, in words, for `show_config`."""

from __future__ import annotations

import os
import platform
import re
import struct
import sys
from pathlib import Path

import torch

from fastqt.devices import target_of
from fastqt.engines import ops

# The vector instructions of fastqt's own products, in the order of `Vectors` in csrc/cpu/panel_product.h.
PRODUCT_LEVELS = ("none", "NEON", "AVX2", "AVX-512", "AVX512-BF16", "AMX")
FATBIN = struct.pack("<I", 0xBA55ED50)  # what a collection of code for GPUs begins with
# Bits of an entry's flags: code for one architecture alone, as sm_90a, or for its family, as sm_100f.
VARIANTS = {1 << 20: "a", 1 << 21: "f"}
PTX, SASS = 1, 2  # kinds of its entries: code that the driver compiles, and code for one architecture
# The levels that csrc/cpu is compiled for besides the oldest, and the flags of a processor that has them.
LEVELS = {
    "x86-64-v4, AVX-512": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "x86-64-v3, AVX2": {"avx2", "fma", "bmi1", "bmi2", "f16c", "movbe"},
}


def versions() -> str:
    """Torch's version, and what it is built for."""
    built = "CPUs alone" if torch.version.cuda is None else f"CUDA {torch.version.cuda}"
    if torch.version.hip is not None:
        built = f"ROCm {torch.version.hip}"
    return f"{torch.__version__}, built for {built}"


def products() -> str:
    """What computes matrix products on a CPU, in the CPU engine and the GRU, and why."""
    if ops.native_error is not None:
        return f"those of torch: {blas()}"
    float32, bfloat16, best, best_bfloat16, timed, slow_bfloat16 = torch.ops.fastqt.product_levels()
    if os.environ.get("FASTQT_CPU_PRODUCTS"):
        why = "as FASTQT_CPU_PRODUCTS asks"
    elif timed:
        why = "the faster where both were timed"
    else:
        why = "not timed on such a processor: FASTQT_CPU_PRODUCTS=own or =torch decides otherwise"
    if slow_bfloat16 and PRODUCT_LEVELS[best_bfloat16] == "AVX512-BF16":
        why = f"{why}; bfloat16 is multiplied in float32, which is faster here"
    levels = (float32, bfloat16) if float32 else (best, best_bfloat16)
    ours = f"fastqt's own, with {' and '.join(PRODUCT_LEVELS[level] for level in levels if level)}"
    if float32:
        return f"{ours} (torch: {blas()}); {why}"
    return f"those of torch: {blas()} ({ours}); {why}" if best else f"those of torch: {blas()}"


def blas() -> str:
    """The library that computes torch's matrix products."""
    text = torch.__config__.show()
    if (found := re.search(r"Math Kernel Library Version (\S+?)-", text)) is not None:
        name = f"Intel MKL {found[1]}"
    elif (found := re.search(r"BLAS_INFO=(\w+)", text)) is not None:
        name = found[1]
    else:
        name = "of torch, which does not name it"
    return f"{name}; oneDNN for 16 bits" if torch.backends.mkldnn.is_available() else name


def simd() -> str:
    """The vector instructions that fastqt's own loops on a CPU are run with, and those of torch's."""
    ours = "none, the extension does not load" if ops.native_error is not None else _level()
    return f"{ours} (torch: {torch.backends.cpu.get_cpu_capability()})"


def _level() -> str:
    machine = platform.machine().lower()
    if machine in ("arm64", "aarch64"):
        return "NEON"
    if machine not in ("x86_64", "amd64") or not sys.platform.startswith("linux"):
        return "the oldest of this architecture"
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    flags = set(next((line for line in lines if line.startswith("flags")), "").split())
    return next((level for level, wanted in LEVELS.items() if wanted <= flags), "x86-64, SSE2")


def cuda_code() -> str:
    """The architectures of GPUs for which the extension holds compiled code, or why it holds none."""
    if ops.cuda_error is not None:
        return f"none: {ops.cuda_error}"
    path = sys.modules["fastqt._C"].__file__
    return ", ".join(architectures(Path(path).read_bytes())) if path is not None else "unknown"


def architectures(library: bytes) -> list[str]:
    """The architectures of the code for GPUs in the content of a library, ascending; PTX comes last.

    nvcc puts code into it as collections of entries, whose headers say what they are and are not compressed.
    """
    found = set()
    start = library.find(FATBIN)
    while start >= 0:
        header, size = struct.unpack_from("<6xHQ", library, start) if start + 16 <= len(library) else (0, 0)
        entry, end = start + header, start + header + size
        while header and entry + 44 <= end <= len(library):
            kind, of_entry, of_code, number = struct.unpack_from("<H2xIQ12xI", library, entry)
            if kind in (PTX, SASS):
                (flags,) = struct.unpack_from("<I", library, entry + 40)
                found.add(
                    (kind == PTX, number, "".join(name for bit, name in VARIANTS.items() if flags & bit))
                )
            if not of_entry:
                break
            entry += of_entry + of_code
        start = library.find(FATBIN, start + 4)
    return [
        f"{'PTX of compute' if is_ptx else 'sm'}_{number}{variant}"
        for is_ptx, number, variant in sorted(found)
    ]


def gpus() -> list[str]:
    """Each GPU that torch can use."""
    if not torch.cuda.is_available():
        return []
    found = []
    for number in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(number)
        found.append(f"{about.name}, {target_of(about)}, {about.total_memory >> 20:,} MiB")
    return found


def devices() -> list[torch.device]:
    """One device of each type that torch can use here."""
    cpu, accelerator = torch.device("cpu"), torch.accelerator.current_accelerator(check_available=True)
    return [cpu] if accelerator is None else [cpu, torch.device(accelerator.type, 0)]


def why_no_gpu() -> str:
    """Why torch can use no GPU."""
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built for CPUs alone"
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None and not visible.strip():
        return "CUDA_VISIBLE_DEVICES is empty"
    try:
        torch.cuda.init()
    except RuntimeError as error:
        return str(error).strip().splitlines()[0]
    return "torch finds no GPU"
