"""The kernel of the row shifts, interpreted: which targets it keeps, which are sound, as a GPU asserts."""

import numpy as np
import pytest
import torch

from fastqt.engines.triton.operands import Operands
from fastqt.engines.triton.softmax import Softmax
from fastqt.problem import Needs, Problem
from fastqt.targets import TargetRows

N, M, D = 30, 24, 5
NOWHERE = 2**31 - 1


def problem(rng, diagonal, grouped, masked):
    """Up to four targets for each row: some columns do not exist, some weights are 0, negative or NaN."""
    counts = rng.integers(0, 5, N)
    columns = rng.integers(-1, M + 1, counts.sum())
    weights = rng.choice([0.0, 0.3, 1.0, -0.5, np.nan], counts.sum(), p=[0.2, 0.4, 0.3, 0.05, 0.05])
    starts = np.concatenate([[0], counts.cumsum()])
    groups = [torch.from_numpy(rng.integers(0, 3, n)) if grouped else None for n in (N, M)]
    mask = torch.from_numpy(rng.random((M, N)) < 0.3).T if masked else None
    queries, candidates = (torch.from_numpy(rng.normal(size=(n, D))).float() for n in (N, M))
    targets = TargetRows(*(torch.from_numpy(x) for x in (starts, columns, weights)))
    return Problem(queries, candidates, None, None, 1.0, targets, diagonal, *groups, mask, "fast")


@pytest.mark.parametrize("masked", [False, True], ids=["", "mask"])
@pytest.mark.parametrize("grouped", [False, True], ids=["", "groups"])
@pytest.mark.parametrize("diagonal", ["zero", "exclude", "keep"])
@pytest.mark.thinned(2)
def test_exact_cells_are_found(diagonal, grouped, masked):
    p = problem(np.random.default_rng(0), diagonal, grouped, masked)
    cells = Softmax(Operands(p, 1.0, Needs())).scores.cells
    starts, columns, weights = (x.numpy() for x in p.targets.compressed())
    mask = np.zeros((N, M), dtype=bool) if p.mask is None else p.mask.numpy()
    groups = (np.arange(N), -np.ones(M)) if not grouped else (p.query_groups, p.candidate_groups)
    for i in range(N):
        part = slice(starts[i], starts[i + 1])
        sound, found = True, []
        for j, weight in zip(columns[part], weights[part], strict=True):
            there = 0 <= j < M
            fault = not there or mask[i, j] or (i == j and diagonal != "keep")
            sound &= weight == 0 or (weight > 0 and not fault)
            found.append(j if there and weight != 0 else -1)
        targets = [j for j in found if j >= 0]
        assert cells.columns[part].tolist() == found
        assert (cells.rows[part] == i).all()
        assert cells.sound[i] == sound
        assert cells.lowest[i] == min(targets, default=NOWHERE)
        assert cells.highest[i] == max(targets, default=-1)
        if diagonal == "zero":
            assert cells.zeroed[i] == (i < M and not mask[i, i] and groups[0][i] != groups[1][i])
    assert set(cells.sound.tolist()) == {False, True}
