"""The moving average of a model's weights, which a training with --average validates and keeps."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

Tensors = tuple[Tensor, ...] | list[Tensor]


class Average:
    """The exponential moving average of the weights after each step, or, without `decay`, these weights.

    Weights that are n steps old count decay**n times as much as the last ones, and the sum is divided by the
    sum of these factors. So the average of a short training is not one of its first weights, as it would be
    without the division. The average takes the memory of another model; only rank 0 needs it.

    Source: the exponential moving average of `torch.optim.swa_utils`, with the correction of its start that
    Adam has for its moments (Kingma and Ba, arXiv:1412.6980, section 3).
    """

    def __init__(self, model: nn.Module, decay: float | None) -> None:
        self._trained, self._decay = model, decay
        self._averaged = None if decay is None else AveragedModel(model, multi_avg_fn=self._move)

    @property
    def model(self) -> nn.Module:
        """The model to validate and to keep: before the first step, the one that is trained."""
        if self._averaged is None or not self._averaged.n_averaged:
            return self._trained
        averaged: nn.Module = self._averaged.module
        return averaged

    def update(self) -> None:
        """Takes the weights of one more step into the average."""
        if self._averaged is not None:
            self._averaged.update_parameters(self._trained)

    def state(self) -> dict[str, Tensor]:
        """The tensors that a checkpoint keeps, which are those of the average itself; none without one."""
        return {} if self._averaged is None else self._averaged.state_dict()

    @torch.no_grad()
    def _move(self, averages: Tensors, weights: Tensors, _: Tensor | int) -> None:
        assert self._averaged is not None  # for mypy: it is the one that calls this
        assert self._decay is not None
        # The number is on the host, where reading it waits for no GPU.
        steps = int(self._averaged.n_averaged) + 1
        torch._foreach_lerp_(averages, weights, (1 - self._decay) / (1 - self._decay**steps))
