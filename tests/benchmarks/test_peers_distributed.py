"""The factors of gradients over several processes: how they are found, and that the stored ones are true."""

import pytest
import torch

from benchmarks.peers_distributed import compared, conventions_table, factor, measured, stored_peers

# float32 sums of 64 rows, in two orders; the factors that are told apart differ by 0.06 or more.
SAME = 1e-3


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

    assert figures("ClipLoss()") == pytest.approx([0.25, 1], abs=SAME)
    assert figures("DisCo-CLIP") == pytest.approx([0.25, 1], abs=SAME)
    assert figures("Inf-CL") == pytest.approx([1, 4], abs=SAME)
    assert figures("DistributedLossWrapper(NTXentLoss(…))") == pytest.approx([1, 4], abs=SAME)
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


def test_the_table_has_a_line_for_each(by_name):
    assert conventions_table(by_name.values()).count("\n") == len(by_name) + 1


@pytest.mark.slow
def test_stored_factors_are_what_is_measured(by_name):
    found = measured()
    check_ours(found)
    assert {"DisCo-CLIP", "Inf-CL"} <= {row["convention"] for row in found}
    for row in found:
        then = by_name[row["convention"]]
        figures = {name: value for name, value in row.items() if isinstance(value, float)}
        assert figures == pytest.approx({name: then[name] for name in figures}, abs=SAME), row["convention"]
