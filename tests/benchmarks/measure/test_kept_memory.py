"""While functions are timed, malloc keeps what they free, and gives it back afterwards."""

import os
import platform

import pytest
import torch

from benchmarks.measure.kept_memory import memory_kept
from benchmarks.measure.timing import Clock, Effort, in_turns
from fastqt.sentences.runs.process_memory import MALLOC_VARIABLES, status_bytes

pytestmark = [
    pytest.mark.skipif(
        platform.libc_ver()[0] != "glibc", reason="glibc's malloc alone is told to keep freed memory"
    ),
    pytest.mark.skipif(
        any(name in os.environ for name in MALLOC_VARIABLES), reason="malloc is set up by the environment"
    ),
]

SIZE = 128 << 20  # bytes


def freed(size: int = SIZE) -> int:
    """By how many bytes the process shrinks when a large tensor is freed."""
    large = torch.ones(size // 4)
    before = status_bytes("VmRSS")
    del large
    return before - status_bytes("VmRSS")


def test_freed_memory_stays_in_the_process_only_while_it_is_kept() -> None:
    assert freed() > 0.9 * SIZE
    with memory_kept() as is_kept:
        assert is_kept
        assert freed() < 0.1 * SIZE
        before = status_bytes("VmRSS")
    assert before - status_bytes("VmRSS") > 0.9 * SIZE  # what was kept
    assert freed(2 * SIZE) > 0.9 * 2 * SIZE  # No free block of the heap is large enough for this tensor.


def test_functions_are_timed_while_it_is_kept() -> None:
    sizes = []

    def step(turn: int) -> list[torch.Tensor]:
        sizes.append(freed(4 * SIZE))  # more than the other test can have left in the heap
        return []

    in_turns({"a": lambda inputs: step}, None, Clock(torch.device("cpu")), Effort(0, 3, 0.0))
    of_memory, *timed = sizes
    assert of_memory > 0.9 * 4 * SIZE  # The peak of memory is measured with malloc as it is.
    assert len(timed) == 3
    assert max(timed) < 0.1 * SIZE
