"""The sides of the benchmark of losses of a whole batch compute the same, and its tables show all of them."""

import pytest
import torch

from benchmarks import peers_whole_batch as peers
from benchmarks.measure.timing import Effort

# Float64 sums of 24 rows in another order, where the library's own adds 1 to them first.
SAME = 1e-9


@pytest.mark.parametrize("case", peers.CASES, ids=lambda case: case.label.replace(" ", "-"))
def test_all_sides_of_a_case_are_the_same(case):
    found = {}
    for name, make in peers.steps_of(case, 24).items():
        try:
            step = make([x.double().requires_grad_() for x in case.inputs(24, False)])
        except ImportError:  # theirs is not installed, or in a version without this loss
            assert name == "theirs"
            continue
        found[name] = step(0)
    assert len(found) >= 2
    for results in found.values():
        for x, wanted in zip(results, found["matrix"], strict=True):
            assert torch.linalg.vector_norm(x - wanted) <= SAME * torch.linalg.vector_norm(wanted)


def test_tables_have_a_row_of_each_case(monkeypatch):
    monkeypatch.setattr(peers, "EFFORT", Effort(warm_ups=0, least_rounds=1, seconds=0))
    case = peers.CASES[0]
    row = peers.measured(case, 24)
    assert row["ours"]["seconds"] > 0
    lines = peers.speed_table([row, {"case": "none", "N": 7}]).splitlines()
    assert lines[-1] == "| none | 7 " + "| – " * 6 + "|"
    errors = {"case": case.label, **peers.errors(case)}
    assert errors["ours"][0] < 1e-6
    assert peers.error_table([errors]).count(case.label) == 1


def test_a_matrix_that_is_too_large_is_left_out():
    assert "matrix" not in peers.steps_of(peers.CASES[0], 2**15)
