"""What devices can do, whose GPU one is, and what CUDA answers for the current device alone, asked about any.

This is the one place that knows vendors; kernels and tiles ask what a GPU can do. A GPU may also be
described: then tensors of the host stand for its own, and nothing is computed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor

AMD = torch.version.hip is not None  # whose GPUs torch then calls "cuda"
# The types of devices for which the kernels have been compiled by a backend of Triton's: NVIDIA's and AMD's.
TRITON_COMPILES_FOR = ("cuda",)
_described: ContextVar[Any] = ContextVar("_described", default=None)
Answer = TypeVar("Answer")


def asked_once(question: Callable[..., Answer]) -> Callable[..., Answer]:
    """A question about the machine, of which a process keeps the answers.

    torch.compile cannot trace it, and takes the answer as a constant. `torch.compiler.assume_constant_result`
    marks a function in the same way, but imports the compiler, which takes seconds.
    """
    cached = functools.cache(question)

    @functools.wraps(question)
    def answer(*arguments: Any) -> Answer:
        return cached(*arguments)

    answer._dynamo_marked_constant = True  # type: ignore[attr-defined]
    answer.cache_clear = cached.cache_clear  # type: ignore[attr-defined]
    return answer


@contextlib.contextmanager
def described(gpu: Any) -> Iterator[None]:
    """The tensors of this thread stand for those of a GPU with these properties."""
    token = _described.set(gpu)
    try:
        yield
    finally:
        _described.reset(token)


def is_described() -> bool:
    """Whether tensors stand for those of a GPU, so that nothing is to be computed."""
    # A tracer cannot read the variable, and what it compiles is for tensors that are there.
    return not torch.compiler.is_compiling() and _described.get() is not None


def on_gpu(x: Tensor) -> bool:
    """Whether a tensor is a GPU's, or stands for one."""
    return x.is_cuda or is_described()


@functools.cache
def known_properties(device: torch.device) -> Any:
    """Those of a GPU, which torch takes several microseconds to look up."""
    return torch.cuda.get_device_properties(device)


def properties(device: torch.device) -> Any:
    """Those of a tensor's GPU, with its name, or of the one that is described."""
    gpu = _described.get()
    return known_properties(device) if gpu is None else gpu


def generation(gpu: Any) -> int:
    """NVIDIA's, which is the compute capability without its minor part, from a GPU's properties.

    It is 0 for AMD's GPUs. torch gives them a compute capability of 9.4 or so, and none is a Hopper.
    """
    return 0 if AMD else gpu.major


@asked_once
def why_too_old(device: torch.device) -> str | None:
    """Why a GPU of NVIDIA's has not the instructions of Ampere, in words; None if it has them.

    Without a driver, as where only shapes are computed, nothing is known of a device.
    """
    if AMD or device.type != "cuda" or not torch.cuda.is_available():
        return None
    gpu = known_properties(device)
    return None if gpu.major >= 8 else f"{gpu.name} has compute capability {gpu.major}.{gpu.minor}, want 8.0"


def shared_bytes(gpu: Any) -> int:
    """The shared memory that a block can have, which AMD calls LDS, from a GPU's properties."""
    # A block can have more than it gets by itself only where torch knows how much.
    return getattr(gpu, "shared_memory_per_block_optin", 0) or gpu.shared_memory_per_block


def target_of(gpu: Any) -> str:
    """How compilers name a GPU, from its properties."""
    return gpu.gcnArchName.split(":")[0] if AMD else f"sm_{gpu.major}{gpu.minor}"


NO_FLOAT64 = ("mps",)  # the types of devices on which torch makes no tensor of it


def accumulation_dtype(device: torch.device) -> torch.dtype:
    """What a few numbers a row are added up in: float64, or float32 on a device that has no float64."""
    return torch.float64 if has_float64(device) else torch.float32


def has_float64(device: torch.device) -> bool:
    """Whether tensors on `device` may be float64."""
    if device.type == "xpu" and torch.xpu.is_available():
        return bool(torch.xpu.get_device_properties(device).has_fp64)  # not on all of Intel's GPUs
    return device.type not in NO_FLOAT64


@asked_once
def has_kernel(operator: str, kind: str) -> bool:
    """Whether torch has an operator for devices of this type."""
    if kind == "cuda":  # also of a torch that is built for CPUs and only traces
        return True
    key = torch._C._dispatch_key_for_device(kind)
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator, key)


def has_assertions(kind: str) -> bool:
    """Whether devices of this type can assert a condition by themselves, for which the host does not wait."""
    return has_kernel("aten::_assert_async.msg", kind)


INTO_FLOAT32 = "aten::addmm.dtype_out"  # the product of two matrices of 16 bits, in float32
# The generations of NVIDIA's GPUs from which tensor cores multiply matrices of these dtypes.
FIRST_GENERATION = {torch.float16: 7, torch.bfloat16: 8}


def product_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """What torch is to multiply matrices of `dtype` in, so that it adds up in float32 at least.

    16 bits stay where torch multiplies them into float32, and the device has instructions for that. A product
    that is rounded to 16 bits would not do: neither scores nor what chunks add to a gradient have digits to
    spare.
    """
    if (
        dtype in FIRST_GENERATION
        and has_kernel(INTO_FLOAT32, device.type)
        and _has_matrix_unit(device, dtype)
    ):
        return dtype
    return torch.promote_types(dtype, torch.float32)


def _has_matrix_unit(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a device multiplies matrices of 16 bits by instructions for that."""
    if device.type == "cuda":
        known = is_described() or torch.cuda.is_available()
        return known and (AMD or generation(properties(device)) >= FIRST_GENERATION[dtype])
    if device.type == "xpu":
        known = torch.xpu.is_available()
        return known and torch.xpu.get_device_properties(device).has_subgroup_matrix_multiply_accumulate
    return True


# The types of devices that do all work in the order of torch's calls. Others have streams.
ONE_STREAM = ("cpu", "mps", "meta")


def is_capturing(device: torch.device) -> bool:
    """Whether kernels that are launched on `device` now are recorded into a CUDA graph.

    torch looks at the current stream of the current device, which need not be the one that a tensor is on.
    """
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def memory_of(device: torch.device) -> int:
    """The bytes of memory that a device has: its own, or the machine's."""
    if device.type == "cuda":
        return int(known_properties(device).total_memory)
    if device.type == "xpu":
        return int(torch.xpu.get_device_properties(device).total_memory)
    return machine_memory()


def machine_memory() -> int:
    """The bytes of memory of this machine."""
    if sys.platform == "win32":
        status = _MemoryStatus()
        status.length = ctypes.sizeof(status)
        if not ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):
            raise ctypes.WinError()
        return int(status.total)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class _MemoryStatus(ctypes.Structure):
    """MEMORYSTATUSEX of the Windows API."""

    _fields_ = (
        ("length", ctypes.c_uint32),
        ("load", ctypes.c_uint32),
        ("total", ctypes.c_uint64),
        ("others", ctypes.c_uint64 * 6),
    )


def usable_processors() -> int:
    """How many processors this process may use, where the system tells; otherwise how many there are."""
    # Neither Windows nor macOS has the call.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
