"""Losses that are one number of a whole batch, over the ranks of a group that holds it.

The functions here run on every rank (see ranks.py). All draw the batch from one seed and take their own rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fastqt
from fastqt.distributed import Group
from tests.shared.every_loss import (
    Inputs,
    few_directions,
    ranked_pairs,
    ranked_scores,
    taught,
    taught_candidates,
)


@dataclass
class Case:
    """A loss of a batch.

    Attributes:
        loss: a public function.
        inputs: all tensors of so many rows, as of tests/shared/every_loss.py; those of 32 bits or more that
            no gradient flows to are in `constant`.
        counts: the number of rows of each rank.
        scaled: whether the loss takes a scale.
    """

    loss: Callable[..., Tensor]
    inputs: Callable[[int, torch.Generator, bool], Inputs]
    options: dict[str, Any] = field(default_factory=dict)
    constant: tuple[str, ...] = ()
    scaled: bool = False
    counts: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float64
    converged: bool = False
    group: dict[str, Any] = field(default_factory=dict)


CASES = {
    "lsep": Case(fastqt.lsep_loss, ranked_scores, scaled=True),
    "cosent": Case(fastqt.cosent_loss, ranked_pairs, scaled=True),
    # 12 columns: of as many rows or fewer the rows travel.
    "spread out": Case(fastqt.spread_out_loss, few_directions),
    "spread out, squares": Case(
        fastqt.spread_out_loss, few_directions, {"mean_weight": 0.0, "hinge": False, "normalize": False}
    ),
    # At 15 columns the rows travel, and at 3 sums over columns.
    "distillation": Case(fastqt.similarity_distillation_loss, taught, constant=("teacher_embeddings",)),
    "distillation of candidates": Case(
        fastqt.similarity_distillation_loss,
        taught_candidates,
        constant=("teacher_embeddings", "teacher_candidates"),
    ),
    "angle": Case(fastqt.angle_loss, ranked_pairs, scaled=True),
}


def compare(case: Case) -> tuple[Tensor, dict[str, float]]:
    """The value, and how far it and this rank's gradients are from those of one process, relatively."""
    rank, size = dist.get_rank(), dist.get_world_size()
    tensors = case.inputs(sum(case.counts), torch.Generator().manual_seed(0), case.converged)
    rows = {name: x.to(case.dtype) if x.is_floating_point() else x for name, x in tensors.items()}
    group = Group(shards="equal" if len(set(case.counts)) == 1 else "uneven", **case.group)

    def computed(of_rank: bool) -> tuple[Tensor, dict[str, Tensor]]:
        taken = {name: x.split(case.counts)[rank] if of_rank else x for name, x in rows.items()}
        given = {
            name: x.clone().requires_grad_(x.is_floating_point() and name not in case.constant)
            for name, x in taken.items()
        }
        if case.scaled:
            given["scale"] = torch.tensor(1.7, dtype=torch.promote_types(case.dtype, torch.float32))
            given["scale"].requires_grad_()
        loss = case.loss(**given, **case.options, **({"group": group} if of_rank else {}))
        (2 * loss).backward()
        return loss.detach(), {name: x.grad for name, x in given.items() if x.requires_grad}

    (wanted, whole), (found, own) = computed(False), computed(True)
    factor = size if group.gradients == "average" else 1
    errors = {"value": _relative(found, wanted, wanted)}
    for name, gradient in own.items():
        expected = whole[name]
        if gradient.dim():
            part = expected.split(case.counts)[rank]
        else:  # as the group's own reduction makes it
            dist.all_reduce(gradient)
            part = expected
        errors[name] = _relative(gradient / factor, part, expected)
    return found, errors


def _relative(found: Tensor, wanted: Tensor, whole: Tensor) -> float:
    if found.shape != wanted.shape or found.dtype is not wanted.dtype:
        return float("inf")
    largest = whole.double().abs().max() if whole.numel() else torch.tensor(1.0)
    difference = (found.double() - wanted.double()).abs()
    return float(difference.max() / largest.clamp(min=1e-300)) if found.numel() else 0.0
