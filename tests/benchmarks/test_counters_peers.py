"""What other libraries' kernels execute is stored beside ours, with what makes it comparable."""

import json
import subprocess
import sys

import pytest
import triton

from benchmarks.counters_table import of_peers, stored_peers

EXACT = 2e-2  # the relative error of values and gradients in bfloat16


@pytest.fixture(scope="module")
def stored():
    return stored_peers()


def test_only_right_values_are_counted(stored):
    for name, record in stored["contestants"].items():
        for arch in ("sm_80", "sm_90"):
            assert max(record[arch]["errors"]) <= EXACT, name
            assert record[arch]["a cell"]["instructions"] > 0
            if record["package"] == "fastqt":
                assert record[arch]["reports"] == []


def test_every_library_has_a_row_a_gpu(stored):
    rows = of_peers(stored).splitlines()[2:]
    assert len(rows) == 2 * len(stored["contestants"])
    for record in stored["contestants"].values():
        assert sum(f" {record['package']} {record['version']} " in row for row in rows) >= 2


@pytest.mark.slow
def test_ours_executes_what_was_stored(stored):
    if stored["triton"] != triton.__version__:
        pytest.skip(f"the counts are of Triton {stored['triton']}, and this is {triton.__version__}")
    command = [sys.executable, "-m", "benchmarks.counters_peers", "--only", "fastqt, sigmoid", "90"]
    counted = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout)
    known = stored["contestants"]["fastqt, sigmoid"]["sm_90"]
    for name in ("a cell", "a row"):
        assert counted[name]["instructions"] == pytest.approx(known[name]["instructions"], rel=0.02)
