"""Losses of other libraries and ours agree where they are compared, also over processes; pages show all."""

import importlib.util

import pytest
import torch

from benchmarks import peers, peers_whole_batch
from benchmarks.measure.timing import Effort
from benchmarks.peers_distributed import compared, factor, measured, stored_peers

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


def test_the_stored_run_has_every_case_and_size():
    stored = peers.stored()
    assert [(r["case"], r["N"]) for r in stored["found"]] == [
        (case.label, N) for case in peers.CASES for N in peers.ROWS
    ]
    assert [r["case"] for r in stored["errors"]] == [case.label for case in peers.CASES]
    assert all("seconds" in r["ours"] for r in stored["found"])


# Float64 sums of 24 rows in another order, where the library's own adds 1 to them first.
SAME_FLOAT64 = 1e-9


@pytest.mark.parametrize("case", peers_whole_batch.CASES, ids=lambda case: case.label.replace(" ", "-"))
def test_all_sides_of_a_case_are_the_same(case):
    found = {}
    for name, make in peers_whole_batch.steps_of(case, 24).items():
        try:
            step = make([x.double().requires_grad_() for x in case.inputs(24, False)])
        except ImportError:  # theirs is not installed, or in a version without this loss
            assert name == "theirs"
            continue
        found[name] = step(0)
    assert len(found) >= 2
    for results in found.values():
        for x, wanted in zip(results, found["matrix"], strict=True):
            assert torch.linalg.vector_norm(x - wanted) <= SAME_FLOAT64 * torch.linalg.vector_norm(wanted)


# float32 sums of 64 rows, in two orders; the factors that are told apart differ by 0.06 or more.
SAME_FACTOR = 1e-3


def test_the_factor_that_fits_best_and_what_it_leaves():
    reference = torch.tensor([3.0, 4.0])
    assert factor(-2 * reference, reference) == pytest.approx((-2, 0), abs=1e-7)
    along, across = 0.5 * reference, torch.tensor([-4.0, 3.0]) / 5
    found, left = factor(along + across, reference)
    assert found == pytest.approx(0.5)
    assert left == pytest.approx(1 / (1 + 2.5**2) ** 0.5)


def test_a_convention_that_is_wrong_shows():
    right = {"encoder": torch.tensor([1.0, 2.0]), "temperature": torch.tensor([3.0])}
    right |= {"loss": 0.5, "bias": torch.tensor([0.0])}
    wrong = {**right, "encoder": torch.tensor([2.0, 1.0]), "temperature": torch.tensor([12.0])}
    found = compared(wrong, right)
    assert found["encoder"] == pytest.approx(0.8)
    assert found["residual"] > 0.5
    assert found["temperature"] == pytest.approx(4)
    assert "bias" not in found, "the loss has none"


@pytest.fixture(scope="module")
def by_name():
    return {row["convention"]: row for row in stored_peers()["found"]}


def test_stored_factors_of_conventions_are_those_of_their_formulas(by_name):
    def figures(name):
        return [by_name[name][key] for key in ("encoder", "temperature")]

    assert figures("ClipLoss()") == pytest.approx([0.25, 1], abs=SAME_FACTOR)
    assert figures("DisCo-CLIP") == pytest.approx([0.25, 1], abs=SAME_FACTOR)
    assert figures("Inf-CL") == pytest.approx([1, 4], abs=SAME_FACTOR)
    assert figures("DistributedLossWrapper(NTXentLoss(…))") == pytest.approx([1, 4], abs=SAME_FACTOR)
    assert by_name["ClipLoss(local_loss=True)"]["residual"] > 0.5, "its direction is wrong"


def check_ours(rows):
    ours = [row for row in rows if row["source"].startswith("fastqt")]
    assert {row["convention"].split("(")[0] for row in ours} == {"clip_loss", "siglip_loss", "info_nce_loss"}
    for row in ours:
        factors = {name: row[name] for name in ("encoder", "temperature", "bias") if name in row}
        assert factors == pytest.approx(dict.fromkeys(factors, 1), abs=1e-5), row["convention"]
        assert row["residual"] < 1e-5, row["convention"]
        assert row["loss_of_rank_0"] == pytest.approx(row["loss_of_batch"], rel=1e-6)


def test_stored_factors_of_fastqt_are_one(by_name):
    check_ours(by_name.values())


@pytest.mark.slow
def test_stored_factors_are_what_is_measured(by_name):
    found = measured()
    check_ours(found)
    assert {"DisCo-CLIP", "Inf-CL"} <= {row["convention"] for row in found}
    for row in found:
        then = by_name[row["convention"]]
        figures = {name: value for name, value in row.items() if isinstance(value, float)}
        assert figures == pytest.approx({name: then[name] for name in figures}, abs=SAME_FACTOR), row[
            "convention"
        ]


def test_losses_measured_anew_take_the_place_of_stored_ones_of_the_same_machine():
    stored = peers_whole_batch.stored()
    rows = stored["found"]
    assert peers_whole_batch.joined(rows, []) == rows
    anew = [{**row, "N": 1} for row in rows if row["case"] == rows[0]["case"]]
    assert peers_whole_batch.joined(rows, anew) == anew + rows[len(anew) :]
    run = {**stored, "machine_info": {**stored["machine_info"], "date": "2000-01-01"}}
    assert peers_whole_batch.others_of(run) == stored
    run["machine_info"]["cpu"] = "another"
    with pytest.raises(SystemExit, match="another machine"):
        peers_whole_batch.others_of(run)
