"""Processes that train together."""

import pytest

from tests.shared.rank_pool import Pool


@pytest.fixture(scope="module")
def pool():
    pool = Pool(4)
    yield pool
    pool.close()
