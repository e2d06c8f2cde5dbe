"""The truth is that of float64, and the stored run shows what plain PyTorch loses near convergence."""

import pytest
import torch

from benchmarks import exactness
from tests.shared.tolerances import relative


@pytest.mark.parametrize("scale", [2.0, 6.0])
def test_the_truth_is_float64s_where_nothing_cancels(scale):
    queries, candidates = exactness.pairs()
    loss, gradient = exactness.truth(queries, candidates, scale)
    leaf = queries.double().requires_grad_()
    value = exactness.eager(leaf, candidates.double(), scale)
    (found,) = torch.autograd.grad(value, leaf)
    assert abs(loss - value.item()) < 1e-12
    assert relative(found, gradient) < 1e-12


@pytest.mark.parametrize("scale", [10, 22])
def test_errors_are_those_of_the_stored_run(scale):
    """Within a factor of four: other CPUs sum in another order."""
    found = exactness.measured(*exactness.pairs(), scale)
    (stored,) = (r for r in exactness.stored()["found"] if r["scale"] == scale)
    assert found["loss"] == pytest.approx(stored["loss"], rel=1e-6)
    for name in exactness.NAMES:
        assert stored["errors"][name] / 4 < found["errors"][name] < 4 * stored["errors"][name]


def test_what_the_stored_run_shows():
    """The claims of docs/concepts.md on this plot."""
    found = exactness.stored()["found"]
    assert [r["scale"] for r in found] == list(exactness.SCALES)
    for r in found:
        if r["loss"] > 1e-9:
            assert r["errors"]["fastqt"] < 1e-5
        if r["loss"] < 1e-7:
            assert r["errors"]["eager"] > 0.5
