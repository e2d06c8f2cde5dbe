"""The dtype in which a training computes, and the scale of the loss that float16 needs."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch
from torch.optim.lr_scheduler import LRScheduler

from fastqt.sentences.runs.progress import Progress

FIRST_SCALE = 2.0**16  # of a loss in float16, as in torch


class Precision:
    """Autocast to 16 bits, or none for float32; with float16 also the scale of the loss.

    Weights, their gradients and the moments of the optimiser stay float32. A loss computes in 16 bits what it
    does in 16 bits under autocast elsewhere: the operands of products, and not their sums. In float16 small
    gradients would become 0, so that `scaler` multiplies the loss, and leaves out each step whose gradients
    overflow. Without float16 it does nothing. A resumed training begins with the scale that `progress` has.
    """

    def __init__(self, name: str, device: torch.device, progress: Progress) -> None:
        self.dtype: torch.dtype = getattr(torch, name)
        self.device = device
        self.has_scale = self.dtype is torch.float16
        scale = progress.loss_scale or FIRST_SCALE
        self.scaler = torch.amp.GradScaler(device.type, init_scale=scale, enabled=self.has_scale)
        if self.has_scale:
            state = self.scaler.state_dict()
            self.scaler.load_state_dict(state | {"_growth_tracker": progress.steps_at_scale})

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """What the forward pass of a step runs in."""
        if self.dtype is torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.dtype)

    def step(self, optimizer: torch.optim.Optimizer, schedule: LRScheduler) -> None:
        """Takes a step of the optimiser, unless a gradient has overflowed, and then of the schedule."""
        self.scaler.step(optimizer)
        self.scaler.update()
        with self._without_warning():
            schedule.step()

    @contextlib.contextmanager
    def _without_warning(self) -> Iterator[None]:
        """Without torch's warning of a first step of the schedule alone, where the optimiser's overflowed."""
        with warnings.catch_warnings():
            if self.has_scale:
                warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
            yield

    def store(self, progress: Progress) -> None:
        """Writes the scale of the loss into the progress of a training, in place."""
        if self.has_scale:
            state = self.scaler.state_dict()
            progress.loss_scale, progress.steps_at_scale = state["scale"], state["_growth_tracker"]
