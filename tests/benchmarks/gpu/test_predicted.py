"""What is printed beside a measurement is what the documents predict."""

import pytest

from benchmarks.gpu.predicted import CONTESTANTS, ONE_LAUNCH, predictions
from benchmarks.gpu.shapes import Shape
from benchmarks.paths import ROOT

PAGE = (ROOT / "docs" / "benchmarks.md").read_text()
MODEL = (ROOT / "benchmarks" / "predict" / "gpu_estimates.md").read_text()
GOALS = MODEL.partition("## Against the goals")[2].partition("\n## ")[0]


def rows(page, *first):
    """The cells of the table rows that begin with these."""
    begin = "| " + " | ".join(first) + " |"
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if begin in line]


def test_predictions_are_those_of_the_benchmarks_page():
    found = rows(PAGE, "triton", "QuickThoughts")
    assert len(found) >= 3
    for _, _, N, D, _, _, ratio in found:
        size = int(N.replace(",", ""))
        predicted = predictions()[Shape(size, size, int(D.replace(",", ""))), CONTESTANTS["fast"]]
        assert f"{predicted.ratio:.2f} ×" == ratio
    found = rows(PAGE, "cuda", "QuickThoughts")
    assert len(found) >= 4
    for _, _, N, D, _, milliseconds, _ in found:
        size = int(N.replace(",", ""))
        predicted = predictions()[Shape(size, size, int(D.replace(",", ""))), ONE_LAUNCH]
        assert f"{predicted.seconds * 1e3:.3f}" == milliseconds


@pytest.mark.parametrize("memory", CONTESTANTS)
def test_predictions_are_those_of_the_model(memory):
    found = [cells for cells in rows(GOALS, "QuickThoughts") if memory in cells]
    assert found
    for cells in found:
        size, D = (int(cell.replace(",", "")) for cell in cells[1:3])
        predicted = predictions()[Shape(size, size, D), CONTESTANTS[memory]]
        assert f"{predicted.ratio:.2f}" in cells
