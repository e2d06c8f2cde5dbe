"""One of two ranks gives a wrong value, or no rows: both raise the same error, and the next call is right."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.shared.loss_options import LOSSES, parameters
from tests.shared.ranks import Ranks
from tests.shared.wrong_options import refused

# What errors name beside arguments: the reach of a window, and what the ranks have to have in common.
OTHERS = ("size", "exchange", "width", "dtype", "requires_grad", "words")
# Other numbers of rows on the ranks are found by the loss that this one calls, and named as there.
NESTED = {"siglip_loss": ("queries", "candidates")}


def check(loss: str, said: list, said_by_other: list) -> None:
    names = "|".join((*parameters(loss), *OTHERS, *NESTED.get(loss, ())))
    # `flops_loss` has one argument of rows, and few options.
    assert len(said) == len(said_by_other) > (5 if loss == "flops_loss" else 20)
    for mine, others in zip(said, said_by_other, strict=True):
        kind, words = mine.wrong
        assert (mine.right[0], others.right[0]) == ("nothing", "nothing"), (mine, others)
        if mine.may_be:
            assert kind == others.wrong[0] == "nothing", (mine, others)
            continue
        assert mine.wrong == others.wrong
        assert kind in ("ValueError", "TypeError"), mine
        assert re.match(rf"({names})\b", words), mine


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "how"), [(loss, ("first", "always")[place % 2]) for place, loss in enumerate(LOSSES)]
)
def test_every_wrong_value_of_one_rank(ranks: Callable[[int], Ranks], loss: str, how: str) -> None:
    check(loss, *ranks(2).run(refused, loss, None, how))


@pytest.mark.parametrize("how", ["first", "always", "again"])
@pytest.mark.parametrize("loss", ["info_nce_loss"])
def test_a_wrong_value_of_one_rank(ranks: Callable[[int], Ranks], loss: str, how: str) -> None:
    """It is found before the ranks agree, or while they do, so that uneven shards learn it in later calls."""
    check(loss, *ranks(2).run(refused, loss, list(range(0, 140, 5)), how))
