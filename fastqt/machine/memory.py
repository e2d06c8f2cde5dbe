"""The memory of a process and of a computation: what "MiB" means in benchmarks and in documents."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

MIB = 1 << 20
STATUS = Path("/proc/self/status")  # of Linux

# Of glibc's malloc.h, and the variables by which a user sets the same.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
MALLOC_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
MOST, NEVER = 2**31 - 1, -1

X = TypeVar("X")
Results = TypeVar("Results", bound="Sequence[Tensor]")


def peak_above_results(function: Callable[[], Results]) -> tuple[Results, int | None]:
    """Runs a function on a CPU and measures its peak of memory above its inputs and its results, in bytes.

    The results of a loss are its value and its gradients, which any implementation has to allocate; the
    function allocates them anew. The peak is None where the system does not report it.
    """
    results, growth = growth_of_process(function)
    return results, above(growth, results)


def above(growth: int | None, results: Sequence[Tensor]) -> int | None:
    """What remains of a growth of memory, in bytes, without that of the results."""
    return None if growth is None else max(growth - sum(x.numel() * x.element_size() for x in results), 0)


def growth_of_process(function: Callable[[], X]) -> tuple[X, int | None]:
    """Runs a function and measures by how many bytes the process grew at most while it ran.

    What the function takes from free memory that malloc holds and cannot give back to the system is not
    counted: a process that has computed little before gives the exact figure. The growth is None where /proc
    does not report it (not Linux).
    """
    if not sys.platform.startswith("linux"):
        return function(), None
    # Memory that malloc kept from earlier calls would be used again without being counted.
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak (VmHWM) to the memory in use
    except OSError:
        return function(), None
    before = status_bytes("VmRSS")
    result = function()
    return result, max(status_bytes("VmHWM") - before, 0)


def mebibytes(size: int | None) -> str:
    """A number of bytes as text in MiB; a dash for None."""
    return "-" if size is None else f"{size / MIB:,.0f}"


def status_bytes(name: str) -> int:
    """A figure of Linux's status of this process in bytes, such as VmRSS, the memory that is in use."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def peak_bytes() -> int | None:
    """The most memory that this process has had in use, in bytes; None where the system does not say."""
    if sys.platform.startswith("linux"):
        # getrusage would count what the process had before it became this program, such as a shell's.
        return status_bytes("VmHWM") if STATUS.exists() else None
    if sys.platform == "win32":
        return None
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def keep_freed_memory() -> bool:
    """Has glibc's malloc keep what is freed for the next tensors; returns whether it does.

    By default it gives a tensor of more than 32 MiB back to the system, and the first use of each page of the
    next one is a page fault. They can take as long as the computation. What the user has set by a variable of
    `MALLOC_VARIABLES` is left as it is.
    """
    libc = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
    if libc is None or not hasattr(libc, "mallopt") or any(name in os.environ for name in MALLOC_VARIABLES):
        return False
    return bool(libc.mallopt(M_MMAP_THRESHOLD, MOST) and libc.mallopt(M_TRIM_THRESHOLD, NEVER))
