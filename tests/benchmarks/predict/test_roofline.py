"""Threads, registers and shared memory each bound how many programs share a multiprocessor."""

import pytest

from benchmarks.predict.roofline import Rates, blocks_per_multiprocessor


@pytest.mark.parametrize(
    ("threads", "registers", "shared", "programs"),
    [
        (128, 32, 0, 16),  # threads
        (256, 255, 0, 1),  # registers: 256 x 256 = 2^16
        (256, 128, 0, 2),
        (128, 168, 0, 3),
        (128, 32, 113 * 1024, 2),  # shared memory, and 1 KiB of each program's own
        (128, 32, 114 * 1024, 1),
        (32, 16, 0, 32),
    ],
)
def test_programs_that_share_a_multiprocessor(threads, registers, shared, programs):
    resources = {"threads": threads, "registers": registers, "shared": shared}
    assert blocks_per_multiprocessor(resources, Rates()) == programs
