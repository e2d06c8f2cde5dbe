"""Calls of losses in which one rank alone gives a wrong value, or no rows, made by all ranks of a group."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import fastqt
from fastqt.distributed import Group
from fastqt.exclusions import Filter, OfIds
from tests.shared.loss_options import N, Options, combinations, inputs, parameters, shown

DECODERS = ("weight", "positions", "bias")  # which all ranks have alike
WRONG = 1  # the rank


class Case(NamedTuple):
    what: str
    right: Options
    wrong: Options
    uneven: bool


def wrong_values(right: Any) -> list[tuple[str, Any]]:
    """Values that an argument cannot have in place of a right one, most of them, each with its name."""
    found: list[tuple[str, Any]] = [("an object", object()), ("a text", "nonsense")]
    if isinstance(right, Tensor) and right.dim():
        other = right.long() if right.is_floating_point() else right.float()
        found += [("a list", right.tolist()), ("another dtype", other), ("another shape", right[None])]
        found += [("one row less", right[:-1]), ("one row more", torch.cat([right, right[:1]]))]
        found += [("another width", right[..., :-1]), ("no rows", right[:0])]
        if not right.is_floating_point() and right.dtype is not torch.bool:
            found += [("too large", right + 2**40), ("below 0", right - 2**40)]
        return found
    if isinstance(right, Filter) or (isinstance(right, list) and any(isinstance(x, Filter) for x in right)):
        several = right if isinstance(right, list) else [right]
        found += [("numbers", [-1, -1]), ("an object beside it", [*several, object()])]
        found += [("two masks", [torch.zeros(N, N, dtype=torch.bool)] * 2)]
        found += [
            ("two margins", [fastqt.Margin(0.1)] * 2),
            ("thresholds too many", fastqt.Above(torch.ones(N + 1))),
        ]
        one = fastqt.Margin(0.1) if not isinstance(several[0], OfIds) else several[0]
        for cut, what in ((slice(1, None), "an id less"), (slice(0, 0), "no ids")):
            for at in range(3) if isinstance(one, OfIds) else ():
                ids = [one.query_ids, one.candidate_ids, one.negative_ids]
                if ids[at] is not None:
                    ids[at] = ids[at][cut]
                    found.append((f"{what}, {at}", [type(one)(*ids), *several[1:]]))
        return found
    if isinstance(right, list):
        return [*found, ("an empty one", []), ("numbers", [-1, -1])]
    return [
        *found,
        ("NaN", math.nan),
        ("a negative number", -1e9),
        ("infinity", math.inf),
        ("a row", torch.ones(1)),
    ]


def refuses(loss: str, arguments: Options) -> bool:
    try:
        getattr(fastqt, loss)(**arguments)
    except (ValueError, TypeError):
        return True
    return False


def without_rows(loss: str, given: Options) -> Options:
    """What a rank gives that has none."""
    of_all_ranks = {*DECODERS, *(["candidates"] if loss == "negative_sampling_loss" else [])}

    def none_of(name: str, x: Any) -> Any:
        if isinstance(x, list):
            return [none_of(name, y) for y in x]
        if isinstance(x, fastqt.Guide):
            return fastqt.Guide(x.queries[:0], x.candidates[:0])
        if isinstance(x, fastqt.Above):
            return fastqt.Above(x.thresholds[:0])
        if isinstance(x, OfIds):
            ids = (x.query_ids, x.candidate_ids, x.negative_ids)
            return type(x)(*(None if each is None else each[:0] for each in ids))
        return x[:0] if isinstance(x, Tensor) and x.dim() and name not in of_all_ranks else x

    return {name: none_of(name, x) for name, x in given.items()}


def fits_a_group(loss: str, options: Options) -> bool:
    """Whether ranks may give what one process takes: no rank has all cells of both directions of a mask."""
    exclude = options.get("exclude")
    return loss != "clip_loss" or not any(
        isinstance(x, Tensor) for x in (exclude if isinstance(exclude, list) else [exclude])
    )


@cache
def cases(loss: str) -> list[Case]:
    """What one process refuses of a loss, by one argument or by two options, and calls without rows."""
    base, found = inputs(loss), []
    ones = [x for x in combinations(loss, 1) if fits_a_group(loss, x)]
    for argument in parameters(loss):
        rights = [base | x for x in ones if argument in base | x and not refuses(loss, base | x)]
        if argument == "group":
            continue
        # Each kind of filter is wrong in ways of its own.
        for right in rights if argument == "exclude" else (rights or [base])[:1]:
            for what, value in wrong_values(right.get(argument)):
                wrong = right | {argument: value}
                if refuses(loss, wrong):
                    found.append(Case(f"{argument}: {what}", right, wrong, False))
    for options in combinations(loss, 2):
        if len(options) > 1 and refuses(loss, base | options):
            found.append(Case(shown(options), base, base | options, False))
    for options in ones:
        if not refuses(loss, base | options):
            given = base | options
            found.append(Case(f"no rows, {shown(options)}", given, without_rows(loss, given), True))
    return [case._replace(right=of_a_rank(case.right), wrong=of_a_rank(case.wrong)) for case in found]


def of_a_rank(given: Options) -> Options:
    """The same in a group, where a mask has the columns of both ranks."""
    return (
        given | {"exclude": with_masks(given["exclude"], lambda x: torch.cat([x, x], 1))}
        if "exclude" in given
        else given
    )


def with_masks(exclude: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """What leaves a loss, with other masks."""
    if isinstance(exclude, list):
        return [with_masks(x, change) for x in exclude]
    return change(exclude) if isinstance(exclude, Tensor) and exclude.dim() == 2 else exclude


class Said(NamedTuple):
    """What a rank says of a wrong call, and of the right one after it."""

    what: str
    may_be: bool  # whether no error is right, too
    wrong: tuple[str, str]
    right: tuple[str, str]


def said(loss: str, arguments: Options, group: Group) -> tuple[str, str]:
    """The kind and the words of what a call raises; of a call that raises nothing, that."""
    try:
        value = getattr(fastqt, loss)(**leaves(arguments), group=group)
        if value.requires_grad:
            value.sum().backward()
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", "finite" if value.isfinite().all() else "not finite"


def leaves(arguments: Options) -> Options:
    return {
        key: x.detach().clone().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x
        for key, x in arguments.items()
    }


def refused(loss: str, numbers: list[int] | None, how: str) -> list[Said]:
    """What the ranks say of a wrong call by one of them, and of the right call that follows.

    Args:
        loss: whose calls.
        numbers: of its `cases`; None for all.
        how: "first", the first call of a group; "always", of a group that compares each call; or "again",
            after a right call of a group of uneven shards.
    """
    found = []
    for number, case in enumerate(cases(loss)):
        if numbers is not None and number not in numbers:
            continue
        uneven = case.uneven or how == "again"
        group = Group(shards="uneven" if uneven else "equal", check="always" if how == "always" else "first")
        if how == "again":
            said(loss, case.right, group)
        given = case.wrong if dist.get_rank() == WRONG else case.right
        if case.uneven and "exclude" in given:
            # The batch has the columns of one rank.
            given = given | {"exclude": with_masks(given["exclude"], lambda x: x[:, : x.shape[1] // 2])}
        wrong = said(loss, given, group)
        found.append(Said(case.what, case.uneven, wrong, said(loss, case.right, group)))
    return found
