"""Losses from labels over the ranks of a group are those of one process with the whole batch."""

from __future__ import annotations

import pytest

from tests.shared.sharded_labels import errors


@pytest.mark.parametrize(
    ("counts", "others", "reduction", "listed"),
    [
        ([5, 5], False, "mean", True),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ([5, 5], False, "none", False),
                ([6, 0, 7], False, "mean", False),
                ([6, 0, 7], True, "sum", True),
                ([1, 8, 3], True, "mean", False),
                ([1, 8, 3], False, "none", True),
            ]
        ),
    ],
)
@pytest.mark.parametrize("loss", ["supcon_loss", "ntxent_loss"])
def test_is_one_processs_with_the_whole_batch(ranks, loss, counts, others, reduction, listed):
    for found in ranks(len(counts)).run(errors, loss, counts, others, reduction, listed):
        assert max(found.values()) < 1e-12, found


@pytest.mark.parametrize(("reduction", "listed"), [("mean", True), ("sum", False), ("none", True)])
def test_prefixes_are_those_of_one_process(ranks, reduction, listed):
    for found in ranks(3).run(errors, "supcon_loss", [1, 8, 3], True, reduction, listed, (2, 6)):
        assert max(found.values()) < 1e-12, found
