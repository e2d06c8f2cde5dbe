"""How a step is taken: its learning rate, the weights that decay, and the dtype in which it computes."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from fastqt.errors import InputError
from fastqt.nn import Gloss
from fastqt.nn.skip_thoughts import Decoder
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.runs.progress import Progress

FIRST_SCALE = 2.0**16  # of a loss in float16, as in torch
TABLES = (nn.Embedding, Gloss, Decoder)  # modules whose own matrices have a row for each word or sentence


class Factor:
    """The factor of the learning rate in a step, of which the first is number 0.

    It rises to 1 in equal parts, the first step having one of them. After that it stays 1, or falls so that
    it would be 0 in the step after the last.
    """

    def __init__(self, config: TrainConfig, steps: int) -> None:
        self.schedule = config.schedule
        self.warmup = round(config.warmup * steps if config.warmup < 1 else config.warmup)
        self.falling = steps - self.warmup  # the number of steps after the warm-up
        if config.schedule != "constant" and self.falling < 1:
            raise InputError(
                f"warmup: want less than the {steps:,} steps of the training, got {self.warmup:,}"
            )

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return (step + 1) / self.warmup
        done = (step - self.warmup) / self.falling if self.schedule != "constant" else 0.0
        return 0.5 * (1 + math.cos(math.pi * done)) if self.schedule == "cosine" else 1 - done


def schedule_of(optimizer: torch.optim.Optimizer, rate: float, factor: Factor, step: int) -> LambdaLR:
    """What sets the learning rates, `rate` times the factors, of a training that has taken `step` steps.

    A rate is a function of the number of its step alone. A checkpoint, which has that number, therefore needs
    no further state of the schedule.
    """
    for group in optimizer.param_groups:
        group["initial_lr"] = rate
    return LambdaLR(optimizer, factor, last_epoch=step - 1)


def parameter_groups(model: nn.Module, config: TrainConfig) -> Iterable[Any]:
    """The parameters of a model for its optimiser: those that decay, and those that do not.

    Matrices decay, but for tables: a step on a few words has no gradient for the other rows, which would
    shrink nevertheless. Norms, biases and single vectors do not decay either. InputError if nothing is left.
    """
    if not config.weight_decay:
        return model.parameters()

    tables = {
        parameter
        for module in model.modules()
        if isinstance(module, TABLES)
        for parameter in module.parameters(recurse=False)
    }
    decays: list[Tensor] = []
    others: list[Tensor] = []
    for parameter in model.parameters():
        is_matrix = parameter.dim() > 1 and len(parameter) > 1
        (decays if is_matrix and parameter not in tables else others).append(parameter)

    if not decays:
        raise InputError(
            f"weight_decay: want 0 with model {config.model} and encoder {config.encoder}, whose weights are "
            f"biases and tables of vectors, which do not decay; got {config.weight_decay:g}"
        )
    return [{"params": decays, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]


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
