"""Whatever tune may choose of the warp-specialised kernel compiles, without a GPU."""

import json
import os
import subprocess
import sys

import pytest

from tests.csrc.building import ROOT


@pytest.mark.slow
def test_every_config_that_tune_tries_compiles_from_its_launch():
    """The launcher's own arguments, specialised by Triton's own launcher: what a device would be given."""
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.benchmarks.offline.compile_launches"]
    run = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    launches = json.loads(run.stdout)
    assert len(launches) > 10
    for found in launches:
        assert found["refused"] is None, found
        assert found["unspilled"], found
        assert found["shared"] <= found["estimate"] <= 227 * 1024, found
        assert found["threads"] == 384, found
