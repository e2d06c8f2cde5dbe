"""The best of a stream of scores, compared with a stable sort of all of them."""

import pytest
import torch

from fastqt.sentences.inference.best import Best


@pytest.mark.parametrize("k", [1, 3, 40, 1000])
@pytest.mark.parametrize("distinct", [2, 10, 10**6])
@pytest.mark.parametrize("part", [1, 7, 300])
def test_the_best_are_those_of_a_stable_sort(k, distinct, part):
    torch.manual_seed(0)
    scores = torch.randint(distinct, (4, 300)).float()
    best = Best(4, k)
    for begin in range(0, 300, part):
        best.add(scores[:, begin : begin + part], begin)
    values, rows = scores.sort(dim=1, descending=True, stable=True)
    assert torch.equal(best.scores, values[:, :k])
    assert torch.equal(best.rows, rows[:, :k])
