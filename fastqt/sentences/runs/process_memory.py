"""How much memory this process takes, as its system says, and whether it keeps what is freed."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

STATUS = Path("/proc/self/status")  # of Linux

# Of glibc's malloc.h, and the variables by which a user sets the same.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
MALLOC_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
MOST, NEVER = 2**31 - 1, -1


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
