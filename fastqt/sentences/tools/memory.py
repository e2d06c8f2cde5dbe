"""The memory of a computation: what "MiB" means in benchmarks, in the demonstration and in documents."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from fastqt.sentences.runs.process_memory import status_bytes

MIB = 1 << 20

X = TypeVar("X")
Results = TypeVar("Results", bound=Sequence[Tensor])


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
