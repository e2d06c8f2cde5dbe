"""Repeated computations have the bits of those that are not; the emulator executes their kernels."""

import json
import os
import subprocess
import sys

import pytest

from tests.csrc.building import ROOT


@pytest.mark.slow
def test_a_repeated_loss_has_the_bits_of_one_that_is_not():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.shared.repeated_losses"]
    run = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    by_name = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(by_name) > 3
    for found in by_name:
        assert found["repeated"] == found["wanted"], found
        assert found["equal"], found
        assert found["reports"] == [], found
