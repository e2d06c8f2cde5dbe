"""Ranks of which one does not do what the others do, in a group that compares every step."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fastqt
from fastqt.distributed import Group
from tests.shared.refusals import ROWS, rows, said

Loss = Callable[..., Tensor]
CONTRASTIVE, SIGMOID = fastqt.contrastive_loss, fastqt.sigmoid_loss


def _backward_left_out(group: Group, wrong: bool) -> None:
    """All ranks compute a loss and its gradients; the wrong one goes on to the next loss at once."""
    loss = CONTRASTIVE(rows(), rows(), group=group)
    if not wrong:
        loss.backward()
    CONTRASTIVE(rows(), rows(), group=group).backward()


def _other_call(right: Callable[[Group], Tensor], other: Callable[[Group], Tensor]) -> Callable[..., None]:
    """A call that the ranks have made before, in whose place the wrong one makes another."""

    def step(group: Group, wrong: bool) -> None:
        right(group).backward()
        (other if wrong else right)(group).backward()

    return step


def _plain(group: Group, n: int = ROWS, loss: Loss = CONTRASTIVE, **options: Any) -> Tensor:
    return loss(rows(n), rows(n), group=group, **options)


def _of_tensor(scale: float) -> Callable[[Group], Tensor]:
    return lambda group: _plain(group, scale=torch.tensor(scale, requires_grad=True))


STEPS: dict[str, Callable[[Group, bool], None]] = {
    "backward": _backward_left_out,
    "scale": _other_call(lambda g: _plain(g, scale=2.0), lambda g: _plain(g, scale=3.0)),
    "bias": _other_call(
        lambda g: _plain(g, loss=SIGMOID, bias=0.5), lambda g: _plain(g, loss=SIGMOID, bias=1.5)
    ),
    "scale of a tensor": _other_call(_of_tensor(2.0), _of_tensor(3.0)),
    "function": _other_call(_plain, lambda g: _plain(g, loss=SIGMOID)),
    "reduction": _other_call(_plain, lambda g: _plain(g, reduction="sum")),
    "rows": _other_call(_plain, lambda g: _plain(g, ROWS - 1)),
    "wrong option": _other_call(_plain, lambda g: _plain(g, diagonal="maybe")),
}


def out_of_step(name: str, options: dict[str, Any]) -> tuple[str, bool]:
    """What this rank says of a step that rank 1 does otherwise, and whether a right step follows."""
    group, wrong = Group(check="always", **options), dist.get_rank() == 1
    message = said(lambda: STEPS[name](group, wrong))
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
