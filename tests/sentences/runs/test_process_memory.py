"""A training's process keeps the memory that it frees, unless its user has told malloc what to do."""

import os
import platform
import subprocess
import sys

import pytest

from fastqt.sentences import cli
from fastqt.sentences.runs.process_memory import MALLOC_VARIABLES

FREED = """
import torch
from fastqt.sentences.runs.process_memory import keep_freed_memory, status_bytes

is_kept = keep_freed_memory()
large = torch.ones(1 << 25)
before = status_bytes("VmRSS")
del large
print(is_kept, (before - status_bytes("VmRSS")) >> 20)
"""


def freed(variables):
    """Whether malloc was told to keep memory, and how many MiB a process shrinks by when it frees 128."""
    others = {name: value for name, value in os.environ.items() if name not in MALLOC_VARIABLES}
    run = subprocess.run(
        [sys.executable, "-c", FREED], env=others | variables, capture_output=True, text=True, check=True
    )
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
