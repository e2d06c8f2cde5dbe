"""Losses that gather across devices have the library's gradients once DDP has averaged them."""

import importlib.util

import pytest

from tests.shared.gathering_ranks import differences
from tests.shared.ranks import Ranks
from tests.shared.tolerances import FLOAT64

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("sentence_transformers") is None, reason="the extra st is not installed"
)


@pytest.fixture(scope="module")
def ranks():
    group = Ranks(2)
    yield group
    group.close()


@pytest.mark.slow  # Each process imports the library, for some seconds.
@pytest.mark.parametrize("columns", [2, 4])
@pytest.mark.parametrize("name", ["MultipleNegativesRankingLoss", "CachedMultipleNegativesRankingLoss"])
def test_gradients_after_ddp_are_the_librarys(ranks, name, columns):
    for found in ranks.run(differences, name, columns):
        assert max(found.values()) < FLOAT64, found
