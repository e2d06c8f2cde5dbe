"""One meaning of a MiB: the peak of memory above inputs and results."""

import subprocess
import sys

import pytest
import torch

from fastqt.sentences.tools import bench, memory
from fastqt.sentences.tools.memory import MIB

ONE_MIB = MIB // 4  # numbers in float32


def allocate(mib):
    return torch.ones(mib * ONE_MIB)


PEAK_OF_WORK = """
import torch
from fastqt.sentences.tools import memory

def allocate(mib):
    return torch.ones(mib * memory.MIB // 4)

def work():
    between = allocate(48)
    return [allocate(16) + between[0]]

results, peak = memory.peak_above_results(work)
print(results[0].numel(), peak)
"""


def test_results_are_not_counted_and_what_is_freed_is():
    """In a process of its own: other tests may leave free memory in a heap that malloc cannot give back."""
    run = subprocess.run([sys.executable, "-c", PEAK_OF_WORK], capture_output=True, text=True, check=True)
    numbers, peak = run.stdout.split()
    if peak == "None":
        pytest.skip("the system does not report the peak of a process")
    assert int(numbers) == 16 * ONE_MIB
    # 48 MiB of `between`, and 16 of the sum's operand; pages of the interpreter come to less than 4.
    assert 60 * MIB < int(peak) < 68 * MIB


def test_a_comparison_takes_away_the_loss_and_the_gradients(monkeypatch):
    """The growth of the process is given here."""
    N, D = 64, 16
    gradients = 2 * N * D * 4

    monkeypatch.setattr(memory, "growth_of_process", lambda function: (function(), 100 * MIB))
    compared = bench.compare(N, D, repeats=1)
    assert compared.fused_bytes == compared.eager_bytes == 100 * MIB - gradients - 4


@pytest.mark.parametrize(
    ("growth", "above"), [(5 * MIB, 4 * MIB), (MIB // 2, 0), (None, None)], ids=["more", "less", "unknown"]
)
def test_a_growth_above_results(growth, above):
    assert memory.above(growth, [allocate(1)]) == above


def test_bytes_in_words():
    assert [memory.mebibytes(size) for size in (None, 0, 3 * MIB, 1234 * MIB + 5)] == ["-", "0", "3", "1,234"]
