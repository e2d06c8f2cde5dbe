"""Ranks that do not make the same call all refuse it in the same words, before anything else travels."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fastqt
from fastqt.distributed import Group
from tests.shared.out_of_step import checked_and_not, of_environment, out_of_step
from tests.shared.ranks import Ranks
from tests.shared.refusals import (
    CALLS,
    OF_DTENSORS,
    OF_MASKS,
    OF_SCALE,
    agreements,
    changed_later,
    dtensors_of_classes,
    masks_that_change,
    nothing_excluded_in_two_words,
    of_another_group,
    refused,
)

SAME = "want the same value on all ranks of the group, got"
ROWS = "want the same number of rows on all ranks of the group, got 4 on ranks 0, 2 and 3 on rank 1; "
UNEVEN = "Group(shards='uneven') takes others"
NONE = "want at least one row on some rank of the group, got none"
PLACED = "want a DTensor of placements (Shard(0),), got (Replicate(),) (on rank 1 of 3)"

FIRST = {"clip_loss": "a", "mixcse_loss": "z1", "simcse_loss": "z1"}  # arguments

# What all three ranks say; where one is wrong it is rank 1.
SAID = {
    "rows": f"queries: {ROWS}{UNEVEN}",
    "rows of clip": f"a: {ROWS}{UNEVEN}",
    "width": f"width: {SAME} 6 on ranks 0, 2 and 7 on rank 1",
    "dtype": f"dtype: {SAME} torch.float32 on ranks 0, 2 and torch.float64 on rank 1",
    "option": f"reduction: {SAME} mean on ranks 0, 2 and sum on rank 1",
    "number": f"mix: {SAME} 0.2 on ranks 0, 2 and 0.3 on rank 1",
    "norms": f"normalize: {SAME} False on ranks 0, 2 and True on rank 1",
    "margin": f"margin: {SAME} 1.0 on ranks 0, 2 and 2.0 on rank 1",
    "option of mixcse": f"partner: {SAME} next on ranks 0, 2 and random on rank 1",
    "scale": f"scale: {SAME} 2.0 on ranks 0, 2 and 3.0 on rank 1",
    "bias": f"bias: {SAME} 0.5 on ranks 0, 2 and 1.5 on rank 1",
    **{f"scale of {name}": f"scale: {SAME} 20.0 on ranks 0, 2 and 3.0 on rank 1" for name in OF_SCALE},
    "scale of one kind": f"scale: {SAME} 2.0 on ranks 0, 2 and a tensor on rank 1",
    "wrong option": "diagonal: want one of 'zero', 'exclude', 'keep', got 'maybe' (on rank 1 of 3)",
    "wrong number": "scale: want a positive number, which is 1 / temperature, got -1.0 (on rank 1 of 3)",
    "requires_grad": f"requires_grad: {SAME} queries and candidates on ranks 0, 2 and queries on rank 1",
    "group's option": f"gradients: {SAME} average on ranks 0, 2 and sum on rank 1",
    "group's check": f"check: {SAME} first on ranks 0, 2 and always on rank 1",
    "function": f"group: {SAME} fastqt.contrastive_loss on ranks 0, 2 and fastqt.sigmoid_loss on rank 1",
    "class": (
        "targets: row 0's target column 12 is outside the M=12 candidates; want 0..11, or -100 for no target "
        "(on rank 1 of 3)"
    ),
    "sparse": "targets: want shape (N, M) = (4, 12), got (4, 13) (on rank 1 of 3)",
    "no rows": f"a: {NONE}",
    "no candidates": f"candidates: {NONE}",
    "negatives alone": "exchange: want 'gather' where a rank has negatives but no candidates, got 'ring'",
    **{f"placement of {loss}": f"{FIRST.get(loss, 'queries')}: {PLACED}" for loss in OF_DTENSORS},
    "few candidates": (
        "diagonal: want 'keep' in a group with more queries (N=12) than candidates (M=9), got 'exclude'"
    ),
}


def test_every_refusal_is_listed() -> None:
    assert SAID.keys() == CALLS.keys()


@pytest.mark.parametrize("name", SAID)
def test_all_ranks_refuse_in_the_same_words(ranks: Callable[[int], Ranks], name: str) -> None:
    """So does the same call once more, and a right call follows."""
    said = f"ValueError: {SAID[name]}"
    assert ranks(3).run(refused, name, 1) == [(said, said, True)] * 3


def test_groups_that_cannot_be(ranks: Callable[[int], Ranks]) -> None:
    member, *others = ranks(3).run(of_another_group)
    assert (member[0], member[5]) == ("nothing", "nothing")
    for rank, said in enumerate(others, start=1):
        outside = f"want one that holds this process, rank {rank} of all, got another"
        mesh = "want a mesh of one dimension, such as mesh['dp'], got 2 dimensions"
        kinds = "want a Group, a ProcessGroup or a DeviceMesh, got"
        assert said == [
            f"ValueError: group: {outside}",
            f"ValueError: group: {mesh}",
            f"TypeError: group: {kinds} str; all processes are torch.distributed.group.WORLD",
            f"TypeError: group: {kinds} int",
            f"ValueError: process_group: {mesh}",
            f"ValueError: process_group: {outside}",
        ]


def test_classes_in_a_dtensor(ranks: Callable[[int], Ranks]) -> None:
    """In a group its rows are taken; elsewhere and otherwise placed it is refused."""
    advice = "want a tensor, or group= of the ranks that hold its rows, got a DTensor of placements"
    for said in ranks(2).run(dtensors_of_classes):
        for in_rows, copied, *alone in (said[:4], said[4:]):
            assert in_rows == "nothing"
            assert "weight: want a DTensor of placements (Shard(0),), got (Replicate(),)" in copied
            assert all(words.startswith(f"ValueError: weight: {advice}") for words in alone)


def test_without_torch_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: False)
    x = torch.randn(3, 4)
    with pytest.raises(RuntimeError, match=r"^process_group: want torch.distributed initialised first"):
        Group()
    with pytest.raises(TypeError, match=r"^group: want a Group, a ProcessGroup or a DeviceMesh, got int"):
        fastqt.clip_loss(x, x, scale=1.0, group=7)


def test_equal_shards_that_change(ranks: Callable[[int], Ranks]) -> None:
    """The rank that has other rows says so by itself, and takes it back where it takes part again."""
    refusal = (
        "ValueError: queries: want 4 rows as in the calls before, got 3; "
        "give the rows of this process only, or Group(shards='uneven') if their number changes"
    )
    assert ranks(3).run(changed_later, False) == [
        ("nothing", "", True, False),
        (refusal, "", True, False),
        ("nothing", "", True, False),
    ]


def test_uneven_shards_are_compared_at_every_call(ranks: Callable[[int], Ranks]) -> None:
    refusal = f"ValueError: {SAID['option']}"
    assert ranks(3).run(changed_later, True) == [("nothing", refusal, True, False)] * 3


@pytest.mark.parametrize("check", ["first", "always"])
@pytest.mark.parametrize("loss", OF_MASKS)
def test_a_mask_of_other_columns_is_refused_by_all_ranks_at_any_call(
    ranks: Callable[[int], Ranks], loss: str, check: str
) -> None:
    """In the first call and in later ones, after which right calls follow."""
    refusal = "ValueError: exclude: want shape (N, M) = (5, 15), got (5, {}) (on rank 1 of 3)"
    wanted = [refusal.format(16), "nothing", refusal.format(14), refusal.format(16), "nothing"]
    assert ranks(3).run(masks_that_change, loss, check, [1, 0, -1, 1, 0]) == [wanted] * 3


def test_an_empty_list_of_filters_is_none(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(3).run(nothing_excluded_in_two_words) == [["nothing"] * 2] * 3


def test_agreements_are_bounded(ranks: Callable[[int], Ranks]) -> None:
    """A schedule of a number is one agreement, and others are forgotten in the order of their making."""
    # Of SimCSE with weighted negatives and of MixCSE; what MixCSE calls agrees on nothing anew.
    assert ranks(3).run(agreements, 20) == [(2, 8)] * 3


# What all three ranks say where they compare every call; a ring visits in the backward pass too.
IN_A_STEP = ("scale", "bias", "scale of a tensor", "function", "option", "wrong option", "rows")
OF_BACKWARD = {"gather": r"gradients of rows \(12, 6\) torch.float32", "ring": "visiting rows"}
GROUPS = ({}, {"shards": "uneven"}, {"exchange": "ring"})
by_group = pytest.mark.parametrize("options", GROUPS, ids=str)


def said_by_all(ranks: Callable[[int], Ranks], name: str, options: dict[str, Any]) -> str:
    """What all ranks say, after which a right step has followed."""
    ((message, goes_on),) = set(ranks(3).run(out_of_step, name, options))
    assert goes_on
    return message


@by_group
@pytest.mark.parametrize("name", IN_A_STEP)
def test_all_ranks_refuse_another_call_in_the_same_words(
    ranks: Callable[[int], Ranks], name: str, options: dict[str, Any]
) -> None:
    takes_it = name == "rows" and "shards" in options
    assert said_by_all(ranks, name, options) == (
        "nothing" if takes_it else f"ValueError: {SAID[name.removesuffix(' of a tensor')]}"
    )


@by_group
def test_a_rank_that_leaves_a_backward_pass_out(
    ranks: Callable[[int], Ranks], options: dict[str, Any]
) -> None:
    message = said_by_all(ranks, "backward", options)
    of_backward = OF_BACKWARD[options.get("exchange", "gather")]
    assert re.fullmatch(
        r"OutOfStepError: group: want all ranks in the same step, each calling the same losses and backward "
        rf"passes in the same order, got {of_backward} in fastqt.contrastive_loss \(call \d+\) on ranks 0, 2 "
        r"and arguments of fastqt.contrastive_loss \(call \d+\) on rank 1",
        message,
    )


@by_group
@pytest.mark.parametrize("loss", ["contrastive_loss", "clip_loss", "simcse_loss"])
def test_a_comparison_changes_no_bit(
    ranks: Callable[[int], Ranks], loss: str, options: dict[str, Any]
) -> None:
    assert ranks(3).run(checked_and_not, loss, options) == [True] * 3


def test_the_environment_variable_sets_the_default(ranks: Callable[[int], Ranks]) -> None:
    found = ranks(3).run(of_environment, ["always", "first", "", "sometimes"])
    refusal = "ValueError: FASTQT_CHECK_RANKS: want one of 'first', 'always', got 'sometimes'"
    assert found == [["always", "first", "first", refusal]] * 3
