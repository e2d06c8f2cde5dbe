"""Ranks of which one does not do what the others do, in a group that compares every step."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fastqt
from fastqt.distributed import Group
from tests.shared.refusals import CALLS, ROWS, rows, said

CONTRASTIVE = fastqt.contrastive_loss


def _backward_left_out(group: Group, wrong: bool) -> None:
    """All ranks compute a loss and its gradients; the wrong one goes on to the next loss at once."""
    loss = CONTRASTIVE(rows(), rows(), group=group)
    if not wrong:
        loss.backward()
    CONTRASTIVE(rows(), rows(), group=group).backward()


def _scale_of_a_tensor(group: Group, wrong: bool, size: int) -> Tensor:
    scale = torch.tensor(2.0 + wrong, requires_grad=True)
    return CONTRASTIVE(rows(), rows(), scale=scale, group=group)


def step(name: str, group: Group, wrong: bool) -> None:
    """A call that the ranks have made before, in whose place the wrong one makes another."""
    if name == "backward":
        return _backward_left_out(group, wrong)
    call = _scale_of_a_tensor if name == "scale of a tensor" else CALLS[name]
    for other in (False, wrong):
        call(group, other, dist.get_world_size()).backward()
    return None


def out_of_step(name: str, options: dict[str, Any]) -> tuple[str, bool]:
    """What this rank says of a step that rank 1 does otherwise, and whether a right step follows."""
    group, wrong = Group(check="always", **options), dist.get_rank() == 1
    message = said(lambda: step(name, group, wrong))
    loss = CONTRASTIVE(rows(), rows(), group=group)
    loss.backward()
    return message, bool(loss.isfinite())


def checked_and_not(loss: str, options: dict[str, Any]) -> bool:
    """Whether a loss and its gradients have the same bits when every step is compared."""
    found = []
    for check in ("first", "always"):
        group, generator = Group(check=check, **options), torch.Generator().manual_seed(dist.get_rank())
        a, b = (torch.randn(ROWS, 6, generator=generator).requires_grad_() for _ in range(2))
        scale = torch.tensor(2.0, requires_grad=True)
        for _ in range(2):
            value = getattr(fastqt, loss)(a, b, scale=scale, group=group)
            found.append([value.detach(), *torch.autograd.grad(value, (a, b, scale))])
    return all(torch.equal(x, y) for other in found[1:] for x, y in zip(found[0], other, strict=True))


def of_environment(values: list[str]) -> list[str]:
    """What a group that is not told its check takes from the environment variable, or says of it."""
    found = []
    for value in values:
        os.environ["FASTQT_CHECK_RANKS"] = value
        message = said(Group)
        found.append(Group().check if message == "nothing" else message)
    del os.environ["FASTQT_CHECK_RANKS"]
    return found
