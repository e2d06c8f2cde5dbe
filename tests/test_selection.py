"""`--benchmark`, an option of the conftest.py at the root, selects the tests of speed."""

import os
import subprocess
import sys

import pytest

from tests.csrc.building import ROOT

CALL = "benchmarks/bench_call.py"


@pytest.mark.slow
@pytest.mark.parametrize("files", [(CALL,), (CALL, "tests/test_errors.py")])
def test_benchmarks_are_selected(files):
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "--benchmark", "--collect-only", *files]
    # A process of pytest-xdist would have pytest-benchmark warn.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    found = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert found.returncode == 0, found.stdout
    assert f"{CALL}::" in found.stdout
    assert "test_errors.py" not in found.stdout
