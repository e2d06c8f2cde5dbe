"""The ranges by which ranks quantise their embeddings are those of all rows."""

import pytest

from tests.shared import quantized_on_ranks
from tests.shared.ranks import RankError


@pytest.mark.parametrize(
    "counts",
    [(3, 2), pytest.param((3, 3), marks=pytest.mark.slow), pytest.param((4, 0), marks=pytest.mark.slow)],
)
def test_ranges_are_those_of_all_ranks(ranks, counts):
    assert ranks(len(counts)).run(quantized_on_ranks.ranges_of_all, counts) == [True] * len(counts)


def test_all_ranks_refuse_widths_that_differ(ranks):
    with pytest.raises(RankError) as raised:
        ranks(2).run(quantized_on_ranks.widths_that_differ)
    for error in raised.value.errors:
        assert "width: want the same value on all ranks" in str(error)
