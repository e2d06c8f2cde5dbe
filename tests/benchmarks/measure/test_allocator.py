"""While functions are timed, malloc keeps what they free, and gives it back afterwards."""

import pytest
import torch

from benchmarks.measure.allocator import memory_kept
from fastqt.sentences.runs.process_memory import STATUS, status_bytes

SIZE = 128 << 20  # bytes


def freed() -> int:
    """By how many bytes the process shrinks when a large tensor is freed."""
    large = torch.ones(SIZE // 4)
    before = status_bytes("VmRSS")
    del large
    return before - status_bytes("VmRSS")


@pytest.mark.skipif(not STATUS.exists(), reason="this system does not say how much memory a process takes")
def test_freed_memory_stays_in_the_process_only_while_it_is_kept() -> None:
    assert freed() > 0.9 * SIZE
    with memory_kept() as can:
        if not can:
            pytest.skip("this system's malloc is not glibc's")
        assert freed() < 0.1 * SIZE
    torch.ones(SIZE // 4)
    assert freed() > 0.9 * SIZE
