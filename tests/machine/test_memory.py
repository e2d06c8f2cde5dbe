"""The memory of a process and of a computation."""

import os
import platform
import re
import subprocess
import sys

import pytest
import torch

from fastqt.machine import memory
from fastqt.machine import memory as process_memory
from fastqt.machine.memory import MALLOC_VARIABLES, MIB, growth_of_process
from fastqt.sentences import cli
from fastqt.sentences.train.progress import peak_memory

ONE_MIB = MIB // 4  # numbers in float32
PEAK_OF_WORK = """
import torch
from fastqt.machine import memory

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


def test_results_are_taken_away_from_the_growth():
    for growth, above in ((5 * MIB, 4 * MIB), (MIB // 2, 0), (None, None)):
        assert memory.above(growth, [torch.ones(ONE_MIB)]) == above


def test_bytes_in_words():
    assert [memory.mebibytes(size) for size in (None, 0, 3 * MIB, 1234 * MIB + 5)] == ["-", "0", "3", "1,234"]


FREED = """
import torch
from fastqt.machine.memory import keep_freed_memory, status_bytes

is_kept = keep_freed_memory()
large = torch.ones(1 << 25)
before = status_bytes("VmRSS")
del large
print(is_kept, (before - status_bytes("VmRSS")) >> 20)
"""


def freed(variables):
    """Whether malloc was told to keep memory, and how many MiB a process shrinks by when it frees 128."""
    others = {name: value for name, value in os.environ.items() if name not in MALLOC_VARIABLES}
    command = [sys.executable, "-c", FREED]
    run = subprocess.run(command, env=others | variables, capture_output=True, text=True, check=True)
    is_kept, mib = run.stdout.split()
    return is_kept, int(mib)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc alone is told to keep memory")
def test_freed_memory_is_kept_unless_the_user_has_chosen():
    is_kept, mib = freed({})
    assert is_kept == "True"
    assert mib < 16
    is_kept, mib = freed({"MALLOC_TRIM_THRESHOLD_": "131072"})
    assert is_kept == "False"
    assert mib > 112


def test_the_command_keeps_memory_in_a_process_of_its_own(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(cli, "keep_freed_memory", lambda: calls.append(1))
    train, evaluate = ["train", "--out", str(tmp_path)], ["evaluate", str(tmp_path), "--data", str(tmp_path)]
    for line, alone in ((train, True), (evaluate, True), (train, False)):
        monkeypatch.setattr(sys, "argv", ["fastqt", *line])
        assert cli.main(None if alone else line) == 2  # no corpus and no run: nothing is computed
        assert bool(calls) == (alone and line is train)
        calls.clear()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere a peak cannot begin anew")
def test_the_peak_of_memory_grows_with_what_is_allocated():
    growth_of_process(lambda: None)  # after which the peak is the memory that is in use
    before = process_memory.peak_bytes()
    torch.ones(16 * MIB)  # of four bytes each
    assert process_memory.peak_bytes() - before > 48 * MIB
    assert re.fullmatch(r"peak memory: [\d,]+ MiB of the process", peak_memory(torch.device("cpu")))
