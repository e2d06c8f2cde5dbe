"""A ring's memory: a few shards of embeddings, so that it falls as 1/P where the batch stays the same."""

from __future__ import annotations

import pytest

from tests.shared.ranks import Ranks
from tests.shared.ring_memory import peaks

LOSSES = ["contrastive_loss", "info_nce_loss", "siglip_loss", "clip_loss"]
ROWS = 2048
VISITORS = 2
# The gradients of both own sides, those of both sides of a visit, and the parts that leave and arrive.
GRADIENTS = 2 + 2 + 2
# Of a shard: tiles of scores, and numbers of float64 for each row and column.
REST = 0.3


@pytest.fixture(scope="module")
def four():
    made = Ranks(4)
    yield made
    made.close()


def check(ranks, *counts):
    for found in ranks.run(peaks, LOSSES, ROWS, *counts):
        for loss, peak in found.items():
            assert VISITORS <= peak["without"] < VISITORS + REST, loss
            assert peak["with"] < VISITORS + GRADIENTS + REST, loss


@pytest.mark.slow
def test_two_shards_visit_at_most(four):
    check(four)


@pytest.mark.slow
def test_shards_of_other_sizes_take_the_room_of_the_greatest(four):
    check(four, [512, 100, 0, 500])


@pytest.mark.slow
def test_memory_falls_as_the_ranks_grow():
    """As many shards as with four ranks, each of which is half as large."""
    eight = Ranks(8)
    try:
        check(eight)
    finally:
        eight.close()
