"""The losses of other libraries and ours agree where they are compared, and the page shows all of them."""

import importlib.util

import pytest
import torch

from benchmarks import peers
from benchmarks.measure.timing import Effort

PACKAGES = {
    peers.SENTENCE_TRANSFORMERS: "sentence_transformers",
    peers.OPEN_CLIP: "open_clip",
    peers.METRIC_LEARNING: "pytorch_metric_learning",
}
# A float32 sum of 24 rows in two orders.
SAME = 1e-5


def skip_without(case):
    package = PACKAGES[case.library]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


@pytest.mark.parametrize("case", peers.CASES, ids=lambda case: case.label.replace(" ", "-"))
def test_both_losses_of_a_case_are_the_same(case, monkeypatch):
    skip_without(case)
    monkeypatch.setattr(peers, "EFFORT", Effort(warm_ups=0, least_rounds=1, seconds=0))
    row = peers.measured(case, 24, None)
    assert row["theirs"]["loss"] == pytest.approx(row["ours"]["loss"], rel=SAME)
    steps = {
        name: make([x.double().requires_grad_() for x in peers.columns_of(case, 24)])
        for name, make in peers.steps_of(case).items()
    }
    for theirs, ours in zip(steps["theirs"](0), steps["ours"](0), strict=True):
        assert torch.linalg.vector_norm(theirs - ours) <= 1e-4 * torch.linalg.vector_norm(theirs)


def test_what_would_take_too_long_is_left_out(monkeypatch):
    case = peers.CASES[0]
    skip_without(case)
    monkeypatch.setattr(peers, "EFFORT", Effort(warm_ups=0, least_rounds=1, seconds=0))
    before = {"N": 8, "theirs": {"seconds": peers.PATIENCE}, "ours": {"seconds": 1e-3}}
    row = peers.measured(case, 16, before)
    assert f"{4 * peers.PATIENCE:.0f} s" in row["theirs"]["reason"]
    assert row["ours"]["loss"] > 0


def test_the_stored_run_has_every_case_and_size():
    stored = peers.stored()
    assert [(r["case"], r["N"]) for r in stored["found"]] == [
        (case.label, N) for case in peers.CASES for N in peers.ROWS
    ]
    assert [r["case"] for r in stored["errors"]] == [case.label for case in peers.CASES]
    assert all("seconds" in r["ours"] for r in stored["found"])
