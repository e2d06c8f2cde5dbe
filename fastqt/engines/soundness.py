"""Whether a loss is defined for the targets of a problem, found on their own device."""

from __future__ import annotations

import torch
from torch import Tensor

from fastqt.devices import has_assertions
from fastqt.engines.reference.contrastive import TARGETS_WANTED, check_targets
from fastqt.problem import Problem


def require_sound_targets(p: Problem) -> None:
    """Raises ValueError for a target that no loss is defined for.

    Reading a condition from another device than a CPU would make the host wait. There it is asserted on the
    device, if that can.
    """
    if p.targets.offsets is not None and p.mask is None:
        return  # Those of a band are the library's own, and sound.
    if p.queries.is_cpu:
        check_targets(p)
    elif has_assertions(p.queries.device.type):
        torch._assert_async(sound(p), TARGETS_WANTED)


def sound(p: Problem) -> Tensor:
    """Whether a loss is defined for the targets, () bool."""
    t, M = p.targets, p.candidates.shape[0]
    if t.dense is not None:
        sound = (t.dense >= 0).all()
        if p.diagonal != "keep":
            sound &= (t.dense.diagonal() == 0).all()
        if p.mask is not None:
            sound &= ~((t.dense != 0) & p.mask).any()
        return sound

    starts, columns, weights = t.compressed()
    row = torch.arange(starts.numel() - 1, device=starts.device)
    row = row.repeat_interleave(starts.diff(), output_size=columns.numel())

    fault = (columns < 0) | (columns >= M)
    if p.diagonal != "keep":
        fault |= row == columns
    if p.mask is not None:
        fault |= p.mask[row, columns.clamp(0, M - 1)]
    return (weights >= 0).all() & ~((weights != 0) & fault).any()
