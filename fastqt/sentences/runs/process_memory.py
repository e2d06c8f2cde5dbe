"""How much memory this process takes, as its system says."""

from __future__ import annotations

import sys
from pathlib import Path

STATUS = Path("/proc/self/status")  # of Linux


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
