"""Losses of sampled negatives over the ranks of a group are those of one process with the whole batch."""

import pytest

from tests.shared.sampled_on_ranks import pairs, windows
from tests.shared.tolerances import FLOAT64

COUNTS = [(6, 5), pytest.param((6, 0, 7), marks=pytest.mark.slow)]


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("errors", [pairs, windows], ids=lambda f: f.__name__)
def test_is_one_processs_with_the_whole_batch(ranks, errors, reduction, counts):
    for found in ranks(len(counts)).run(errors, counts, reduction):
        assert max(found.values()) < FLOAT64, found
