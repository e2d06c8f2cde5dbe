"""The stored pages of predictions show what the stored JSON gives, and that what the engine launches."""

import json
import subprocess
import sys

import pytest

from benchmarks.offline.compile import ROOT
from benchmarks.predict import cuda_estimate, estimate


@pytest.mark.parametrize("module", [estimate, cuda_estimate], ids=lambda module: module.DOCUMENT.name)
def test_page_is_rendered_from_its_stored_inputs(module):
    page = module.rendered(json.loads(module.STORED.read_text()))
    assert page == module.DOCUMENT.read_text(), f"render it again: python -m {module.__name__}"


@pytest.mark.slow
def test_stored_launches_are_the_engines():
    # In a process of its own, in which Triton does not interpret.
    command = [sys.executable, "-m", "benchmarks.predict.collect"]
    run = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True)
    stored = json.loads(estimate.STORED.read_text())["schedules"]
    for now, then in zip(json.loads(run.stdout), stored, strict=True):
        problem = [now[name] for name in ("loss", "N", "D", "memory")]
        assert now == then, f"{problem}: store it again: python -m benchmarks.predict.estimate --write"
