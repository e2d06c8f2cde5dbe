"""Losses over ranks under torch.compile, over a part of the processes, and of tensors that a mesh holds."""

from __future__ import annotations

import pytest
import torch

from tests.shared.compiled_losses import (
    LOSSES,
    OF_BOTH,
    compiled,
    compiled_with,
    in_subgroup,
    of_a_column_sharded_dtensor,
    of_dtensors,
)
from tests.shared.ranks import RankError
from tests.shared.sharded_losses import Case

TOLERANCE = 1e-6
# What reads a number on the host, or makes as many rows as numbers say.
WAITING = ("aten._local_scalar_dense", "aten.item", "aten.nonzero")


def check(found):
    for errors, operators, graphs in found:
        assert max(errors) < TOLERANCE
        assert graphs == 2  # of the forward and of the backward pass
        assert not [name for name in operators if name.startswith(WAITING)]


def collectives(operators):
    names = {name.split(".")[1]: n for name, n in operators.items() if name.startswith("_c10d_functional")}
    waits = names.pop("wait_tensor")
    assert waits == sum(names.values())
    return names


@pytest.mark.slow
def test_a_compiled_loss_equals_eager(ranks):
    found = ranks(2).run(compiled, "info_nce", {})
    check(found)
    for _, operators, _ in found:
        # The candidates and the loss; the candidates' gradients on their way home, as on a CPU.
        assert collectives(operators) == {"all_gather_into_tensor": 2, "all_to_all_single": 1}


# MixCSE reads its partners on the host in one process too, which is no part of a graph.
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in LOSSES if name not in ("info_nce", "mixcse")])
def test_compiled_losses_equal_eager(ranks, name):
    check(ranks(2).run(compiled, name, {}))


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_compiled_losses_with_the_options_of_a_group(ranks, size):
    for options in ({"gradients": "sum"}, {"edges": "cut"}, {"exchange": "gather"}):
        check(ranks(size).run(compiled, "contrastive", options))
    check(ranks(size).run(compiled, "contrastive", {"return_dtype": torch.bfloat16}))


@pytest.mark.slow
def test_compiled_code_equals_eager(ranks):
    for errors, _, _ in ranks(2).run(compiled, "clip", {}, "inductor"):
        assert max(errors) < TOLERANCE


@pytest.mark.parametrize(
    ("what", "options", "message"),
    [
        ("ring", {"exchange": "ring"}, "exchange: want 'auto' or 'gather' under torch.compile, got 'ring'"),
        ("uneven", {"shards": "uneven"}, "group: want shards='equal' under torch.compile, got 'uneven'"),
        ("compared", {"check": "always"}, "check: want 'first' under torch.compile, whose graphs compare"),
        ("process group", {}, "group: want a fastqt.distributed.Group under torch.compile"),
    ],
)
def test_what_no_graph_holds_is_refused(ranks, what, options, message):
    with pytest.raises(RankError, match=message):
        ranks(2).run(compiled_with, what, options)


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
