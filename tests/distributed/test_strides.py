"""Tensors that are no dense matrices.

No two numbers of a batch are equal, so that a row that collectives have scrambled or moved is seen.
"""

from __future__ import annotations

import pytest

from tests.shared.ranks import Ranks
from tests.shared.sharded_strides import OPTIONS, compare
from tests.shared.tolerances import FLOAT64


@pytest.fixture(scope="module")
def ranks():
    made = Ranks(3)
    yield made
    made.close()


def check(ranks, loss, exchange, counts):
    for found in ranks.run(compare, loss, exchange, counts):
        for layout, error in found.items():
            assert error < FLOAT64, layout


@pytest.mark.parametrize("loss", ["contrastive_loss", "clip_loss"])
@pytest.mark.parametrize("exchange", ["gather", "ring"])
def test_layouts(ranks, loss, exchange):
    check(ranks, loss, exchange, [4, 4, 4])


@pytest.mark.slow
@pytest.mark.parametrize("loss", OPTIONS)
@pytest.mark.parametrize("exchange", ["gather", "ring"])
@pytest.mark.parametrize("counts", [[5, 5, 5], [5, 1, 7], [0, 3, 4]], ids=str)
def test_layouts_of_every_loss(ranks, loss, exchange, counts):
    check(ranks, loss, exchange, counts)
