"""What the operators of csrc/cpu make of targets that are repeated, tiny, huge or infinite."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from fastqt.engines import ops
from tests.shared.tolerances import FLOAT64, relative

pytestmark = pytest.mark.skipif(ops.native_error is not None, reason=str(ops.native_error))
N, M, K, D = 4, 7, 2, 3
NOT_FINITE = 5  # as in csrc/cpu/score_tile.h
OPERATORS = ("loss_rows", "loss_with_gradients", "loss_backward")


def problem(rows: list[list[tuple[int, float]]], **changes: Any) -> dict[str, Any]:
    """The arguments for targets that are given as the columns and weights of each row."""
    generator = torch.Generator().manual_seed(0)
    queries, candidates, negatives = (
        torch.randn(n, D, generator=generator, dtype=torch.float64) for n in (N, M, K)
    )
    columns, weights = zip(*itertools.chain(*rows), strict=True)
    return {
        "queries": queries,
        "candidates": candidates,
        "negatives": negatives,
        "row_negatives": None,
        "bias": None,
        "scale": 2.0,
        "link": 0,
        "diagonal": 2,
        "starts": torch.tensor([0, *itertools.accumulate(map(len, rows))]),
        "columns": torch.tensor(columns),
        "weights": torch.tensor(weights, dtype=torch.float64),
        "dense": None,
        "background": None,
        "query_groups": None,
        "candidate_groups": None,
        "mask": None,
        "normalize": False,
        "row_scores": None,
        "thresholds": None,
        "tile_rows": 3,
        **changes,
    }


def results(given: dict[str, Any], tile_columns: int) -> tuple[list[Tensor], list[tuple[int, ...]]]:
    """The losses and gradients that the operators find, and the faults that each reports."""
    needs = [True, True, True, False, True, False, False]
    call = torch.ops.fastqt
    logsumexp, mass, loss, *first = call.contrastive_loss_rows(**given, tile_columns=tile_columns)
    tiles = tile_columns if given["link"] == 1 else None
    total, once, *second = call.contrastive_loss_with_gradients(
        **given, tile_columns=tiles, row_weight=1.0, needs=needs
    )
    again, *third = call.contrastive_loss_backward(
        **given,
        tile_columns=tile_columns,
        row_weights=torch.ones(N, dtype=torch.float64),
        logsumexp=logsumexp,
        mass=mass,
        needs=needs,
    )
    return [loss, total, *once, *again], [tuple(first), tuple(second), tuple(third)]


SUMMED = [[(1, 0.75), (5, 2.0)], [(0, 1.0)], [], [(6, 1.5), (2, 0.25)]]
REPEATED = [
    [(1, 0.5), (5, 2.0), (1, 0.25)],
    [(0, 1.0), (3, 0.0), (3, 0.0)],
    [],
    [(6, 0.5), (6, 0.5), (2, 0.25), (6, 0.5)],
]


@pytest.mark.parametrize("tile_columns", [1, 3, 100])
@pytest.mark.parametrize("background", [None, 0.125], ids=["sparse", "smoothed"])
@pytest.mark.parametrize("link", [0, 1], ids=["softmax", "sigmoid"])
def test_the_weights_of_a_repeated_column_are_summed(link, background, tile_columns):
    changes = {"link": link}
    if background is not None:
        changes["background"] = torch.full((N,), background, dtype=torch.float64)
    expected, _ = results(problem(SUMMED, **changes), tile_columns)
    found, faults = results(problem(REPEATED, **changes), tile_columns)
    assert faults == [(0, 0, 0)] * 3
    for a, b in zip(found, expected, strict=True):
        assert relative(a, b) < FLOAT64


@pytest.mark.parametrize("link", [0, 1], ids=["softmax", "sigmoid"])
def test_a_repeated_column_whose_score_is_minus_infinity_counts_once(link):
    bias = torch.zeros(M, dtype=torch.float64)
    bias[6] = -torch.inf
    expected, _ = results(problem(SUMMED, link=link, bias=bias), 3)
    found, _ = results(problem(REPEATED, link=link, bias=bias), 3)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=0, equal_nan=True)
    assert found[0][3] == torch.inf
    assert found[0][:3].isfinite().all()


def test_a_background_on_a_score_of_minus_infinity_gives_an_infinite_loss():
    bias = torch.zeros(M, dtype=torch.float64)
    bias[6] = -torch.inf
    background = torch.full((N,), 0.125, dtype=torch.float64)
    found, _ = results(problem(SUMMED, bias=bias, background=background), 3)
    assert (found[0] == torch.inf).all()


@pytest.mark.parametrize("tile_columns", [1, 3, 100])
@pytest.mark.parametrize("row", [[(2, torch.inf)], [(2, 1e308), (4, 1e308)], [(3, 1e308), (3, 1e308)]])
def test_targets_that_are_not_finite_are_reported(row, tile_columns):
    last = row[-1][0]
    _, faults = results(problem([[(1, 1.0)], row, [], []]), tile_columns)
    # The backward pass is given the mass, so that it sees weights that are infinite by themselves only.
    assert faults[:2] == [(NOT_FINITE, 1, last)] * 2
    if row == [(2, torch.inf)]:
        assert faults[2] == (NOT_FINITE, 1, last)


def test_the_first_row_at_fault_is_reported():
    """Whichever thread finds its fault first; a sanitizer sees whether they take turns."""
    _, faults = results(problem([[(1, 1.0)], *[[(row, torch.inf)] for row in range(1, N)]]), 3)
    assert faults == [(NOT_FINITE, 1, 1)] * 3


@pytest.mark.parametrize("weight", [1e300, 1e30, 1e-30, 1e-300])
def test_the_loss_of_extreme_weights(weight):
    """With one target of weight w the loss is w (log w - log P), and its gradient w times that of -log P."""
    one, _ = results(problem([[(1, 1.0)]] * N), 3)
    found, faults = results(problem([[(1, weight)]] * N), 3)
    assert faults == [(0, 0, 0)] * 3
    log = torch.tensor(weight, dtype=torch.float64).log()
    assert relative(found[0] / weight, one[0] + log) < FLOAT64
    for a, b in zip(found[2:], one[2:], strict=True):
        assert relative(a / weight, b) < FLOAT64


def test_a_subnormal_weight_is_right_up_to_the_least_normal_number():
    least = torch.finfo(torch.float64).tiny
    one, _ = results(problem([[(1, 1.0)]] * N), 3)
    found, _ = results(problem([[(1, 1e-309)]] * N), 3)
    for a, b in zip(found[2:], one[2:], strict=True):
        assert ((a - 1e-309 * b).abs() < 100 * least).all()
