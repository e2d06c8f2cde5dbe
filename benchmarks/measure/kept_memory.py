"""What malloc does with the memory that a computation has freed, which costs time that is not its own."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

from fastqt.machine.memory import M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, keep_freed_memory

# What the thresholds become by themselves in a process that has freed a large tensor.
LARGEST_MMAP_THRESHOLD, ITS_TRIM_THRESHOLD = 32 << 20, 64 << 20


@contextlib.contextmanager
def memory_kept() -> Iterator[bool]:
    """While it lasts, malloc keeps what is freed for the next tensors; False where it cannot be told to.

    glibc gives tensors of more than 32 MiB back to the system, and the next one has a page fault every 4 KiB.
    What that costs depends on the system, on what ran before and, in a virtual machine, on its host: between
    nothing and as much as the computation itself, and most where matrices are allocated. Functions are timed
    without it, as with the allocators that PyTorch's tuning guide recommends (jemalloc, tcmalloc).
    `benchmarks.allocator` measures what it costs.
    """
    if not keep_freed_memory():
        yield False
        return
    try:
        yield True
    finally:
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD)
        libc.mallopt(M_TRIM_THRESHOLD, ITS_TRIM_THRESHOLD)
        libc.malloc_trim(0)  # What was kept until now goes back to the system.
