"""A memory bank that the ranks of a group fill together holds the same on all of them."""

import pytest

from tests.shared import queue_on_ranks
from tests.shared.ranks import RankError

CLOSE = 1e-12


@pytest.mark.parametrize(
    ("counts", "exchange"),
    [
        ((3, 2), "gather"),
        pytest.param((3, 2), "ring", marks=pytest.mark.slow),
        pytest.param((2, 2), "gather", marks=pytest.mark.slow),
        pytest.param((4, 0, 3), "gather", marks=pytest.mark.slow),
        pytest.param((9, 9), "ring", marks=pytest.mark.slow),  # more than the queue holds
    ],
    ids=str,
)
def test_holds_the_rows_of_all_ranks(ranks, counts, exchange):
    """A loss with each rank's shard of the rows is that of one process with all rows."""
    for equal, errors in ranks(len(counts)).run(queue_on_ranks.filled_together, counts, exchange):
        assert equal
        assert max(errors) < CLOSE


@pytest.mark.slow
def test_buffers_that_ddp_sends_are_those_that_are_there(ranks):
    for error in ranks(2).run(queue_on_ranks.in_ddp):
        assert error < CLOSE


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (queue_on_ranks.queues_that_differ, "labels of the queue: want the same value on all ranks"),
        (queue_on_ranks.wrong_labels, "labels: want 3, one a row, got 2"),
    ],
)
def test_all_ranks_refuse_what_one_does(ranks, call, message):
    with pytest.raises(RankError) as raised:
        ranks(2).run(call)
    for error in raised.value.errors:
        assert isinstance(error, ValueError)
        assert message in str(error)
