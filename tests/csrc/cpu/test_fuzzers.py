"""Fuzzers of the C++ operators find nothing in a few inputs; `python -m tests.fuzz.native` runs millions."""

import os
import subprocess

import pytest

from tests.fuzz.native.__main__ import SETTINGS, write_seeds
from tests.fuzz.native.build import TARGETS, compiler, fuzzer


@pytest.mark.slow
@pytest.mark.skipif(compiler() is None, reason="no clang with libFuzzer")
@pytest.mark.parametrize("target", TARGETS)
def test_a_few_hundred_inputs(target, tmp_path):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    write_seeds(corpus)
    command = [fuzzer(target), "-runs=500", "-seed=1", f"-artifact_prefix={tmp_path}/", corpus]
    run = subprocess.run(command, env=os.environ | SETTINGS, capture_output=True, text=True, errors="replace")
    assert run.returncode == 0, run.stderr
    accepted = [line for line in run.stderr.splitlines() if line.startswith("accepted: ")]
    assert int(accepted[-1].split()[1]) > 100
