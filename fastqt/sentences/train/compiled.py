"""torch.compile of the parts of an encoder from which it makes one kernel of many operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fastqt.errors import InputError, one_line
from fastqt.nn import Encoder
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.runs.encoders import form_of

# One program for batches of all shapes, so that a resumed training runs the one of an uninterrupted training
# whatever batch it begins with. Dropout takes the random numbers that it takes without the compiler.
OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {"fallback_random": True}


def compile_encoders(model: nn.Module, config: TrainConfig, device: torch.device) -> None:
    """Has torch compile the encoders of a model when they are first called, if the settings say so.

    An encoder's form says which of its modules are compiled. The names of weights stay the same. InputError
    where torch cannot compile for the device, as without a C++ compiler for a CPU.
    """
    if not config.compile:
        return
    _check_compiler(device)
    for encoder in [module for module in model.modules() if isinstance(module, Encoder)]:
        for part in form_of(encoder).compiled(encoder):
            part.compile(dynamic=True, options=OPTIONS)


def _check_compiler(device: torch.device) -> None:
    """Compiles a function of one operation."""

    def function(x: Tensor) -> Tensor:
        return x + 1

    try:
        torch.compile(function, dynamic=True, options=OPTIONS)(torch.zeros(2, device=device))
    except Exception as error:
        raise InputError(
            f"compile: want a machine on which torch.compile works; it fails with: {one_line(error, 300)}"
        ) from error
