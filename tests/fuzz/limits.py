"""A limit of the memory that one input may take."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

MEMORY = 2 << 30  # bytes, beyond what the process has before


@contextlib.contextmanager
def memory_limited(more: int = MEMORY) -> Iterator[None]:
    """Lets allocations fail that would make the process grow by more than `more` bytes of address space."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
