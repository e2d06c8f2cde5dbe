"""Compares before each exchange that the ranks of a group are about to do the same, if the group asks for it.

Ranks that are out of step, such as one that leaves out a backward pass, meet in collectives that do not
belong together. Gloo then ends the processes, or a message of a wrong size is received in part. With
`Group(check="always")` a small exchange goes before each one: what the rank is about to exchange.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fastqt.distributed import faults
from fastqt.distributed.group import Group

Result = TypeVar("Result")

# By process group, how many calls this rank has begun of losses whose steps are compared.
_calls: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def begin(group: Group) -> None:
    """Counts a call of a public function."""
    if group.check == "always":
        _calls[group.process_group] = _calls.get(group.process_group, 0) + 1


def exchange(
    group: Group, what: str, function: Callable[..., Result], /, *args: object, **options: object
) -> Result:
    """`faults.exchange` of a collective whose tensors have the same shapes on all ranks.

    Raises:
        OutOfStepError: the group compares its steps, and a rank is about to exchange something else.
        ExchangeError: as of `faults.exchange`.
    """
    shapes = [f"{tuple(x.shape)} {x.dtype}" for x in args if isinstance(x, Tensor)][-1:]
    compare(group, " ".join((what, *shapes)))
    return faults.exchange(group, what, function, *args, **options)


def compare(group: Group, what: str) -> None:
    """Compares between the ranks what each is about to exchange, if the group asks for that.

    Raises:
        OutOfStepError: on all ranks, if they differ.
    """
    if not torch.compiler.is_compiling() and group.check == "always":
        step = f"{what} in {group.function}"
        _gathered(group, step, step, None)


def objects(group: Group, what: str, mine: Any) -> list[Any]:
    """What each rank gives, any objects.

    Raises:
        OutOfStepError: the group compares its steps, and a rank is about to exchange something else.
    """
    # Functions that differ are named when the arguments are compared.
    return _gathered(group, what, f"{what} of {group.function}", mine)


def _gathered(group: Group, kind: str, step: str, mine: Any) -> list[Any]:
    """Each rank's object, from ranks that all name the same kind of step."""
    everyone: list[Any] = [None] * group.size
    if group.check == "always":
        step += f" (call {_calls.get(group.process_group, 0)})"
    given = kind, step, mine
    faults.exchange(group, "arguments", dist.all_gather_object, everyone, given, group=group.process_group)
    if any(other != kind for other, _, _ in everyone):
        ranks: dict[str, list[int]] = {}
        for rank, (_, other, _) in enumerate(everyone):
            ranks.setdefault(other, []).append(rank)
        shown = " and ".join(f"{other} on {faults.named(those)}" for other, those in ranks.items())
        raise faults.OutOfStepError(
            "group: want all ranks in the same step, each calling the same losses and backward passes in "
            f"the same order, got {shown}"
        )
    return [each for _, _, each in everyone]
