"""Losses over a part of the processes, and of tensors that a mesh of them holds."""

from __future__ import annotations

import pytest

from tests.shared.compiled_losses import (
    LOSSES,
    OF_BOTH,
    in_subgroup,
    of_a_column_sharded_dtensor,
    of_dtensors,
)
from tests.shared.ranks import RankError
from tests.shared.sharded_losses import Case

CASES = [
    Case("contrastive_loss", (6, 6), given=("scale",)),
    Case("contrastive_loss", (5, 3), options={"window": {"size": 3}}, group={"shards": "uneven"}),
    Case("clip_loss", (6, 6), given=("scale",)),
    Case("siglip_loss", (6, 6), given=("scale", "bias")),
    Case("mixcse_loss", (6, 6), options={"partner": "random"}, given=("generator",)),
    Case("curl_block_loss", (6, 6), options={"negatives": "random"}, given=("generator",)),
]


@pytest.mark.parametrize("exchange", ["gather", pytest.param("ring", marks=pytest.mark.slow)])
@pytest.mark.parametrize("members", [[1, 3], pytest.param([0, 2, 3], marks=pytest.mark.slow)])
def test_a_group_whose_ranks_are_not_the_global_ones(ranks, members, exchange):
    """The two or three ranks have other numbers in their group; the others take no part."""
    cases = [Case(**{**vars(case), "counts": (*case.counts, 6)[: len(members)]}) for case in CASES]
    for case in cases:
        case.group = {**case.group, "exchange": exchange}
    found = ranks(4).run(in_subgroup, members, cases)
    for rank, answers in enumerate(found):
        assert (answers is not None) == (rank in members)
        for case, answer in zip(cases, answers or (), strict=False):
            assert max(answer.errors.values()) < 1e-12, (case, answer.errors)


@pytest.mark.parametrize("dimensions", [(4,), (2, 2)])
def test_dtensors_of_rows_are_the_rows_of_their_ranks(ranks, dimensions):
    for name in LOSSES.keys() - OF_BOTH:
        for errors in ranks(4).run(of_dtensors, name, dimensions):
            assert errors == [0, 0, 0], name


def test_a_dtensor_of_columns_is_refused(ranks):
    with pytest.raises(RankError, match=r"candidates: want a DTensor of placements \(Shard\(0\),\)"):
        ranks(4).run(of_a_column_sharded_dtensor)
