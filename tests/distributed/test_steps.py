"""With check="always" ranks that are out of step all raise the same error, and a right step can follow."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.shared.out_of_step import STEPS, checked_and_not, of_environment, out_of_step
from tests.shared.ranks import Ranks

SAME = "want the same value on all ranks of the group, got"
# What all three ranks say of what rank 1 does otherwise; a ring visits in the backward pass too.
OF_BACKWARD = {"gather": r"gradients of rows \(12, 6\) torch.float32", "ring": "visiting rows"}
SAID = {
    "scale": f"scale: {SAME} 2.0 on ranks 0, 2 and 3.0 on rank 1",
    "bias": f"bias: {SAME} 0.5 on ranks 0, 2 and 1.5 on rank 1",
    "scale of a tensor": f"scale: {SAME} 2.0 on ranks 0, 2 and 3.0 on rank 1",
    "function": f"group: {SAME} fastqt.contrastive_loss on ranks 0, 2 and fastqt.sigmoid_loss on rank 1",
    "reduction": f"reduction: {SAME} mean on ranks 0, 2 and sum on rank 1",
    "wrong option": "diagonal: want one of 'zero', 'exclude', 'keep', got 'maybe' (on rank 1 of 3)",
    "rows": (
        "queries: want the same number of rows on all ranks of the group, got 4 on ranks 0, 2 and 3 on rank "
        "1; Group(shards='uneven') takes others"
    ),
}
GROUPS = ({}, {"shards": "uneven"}, {"exchange": "ring"})
by_group = pytest.mark.parametrize("options", GROUPS, ids=str)


def test_every_step_is_listed() -> None:
    assert STEPS.keys() == {"backward", *SAID}


def said_by_all(ranks: Callable[[int], Ranks], name: str, options: dict[str, Any]) -> str:
    """What all ranks say, after which a right step has followed."""
    ((message, goes_on),) = set(ranks(3).run(out_of_step, name, options))
    assert goes_on
    return message


@by_group
@pytest.mark.parametrize("name", SAID)
def test_all_ranks_refuse_another_call_in_the_same_words(
    ranks: Callable[[int], Ranks], name: str, options: dict[str, Any]
) -> None:
    takes_it = name == "rows" and "shards" in options
    assert said_by_all(ranks, name, options) == ("nothing" if takes_it else f"ValueError: {SAID[name]}")


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
