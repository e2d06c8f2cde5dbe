"""Each loss module with its function, options, and a batch to call both with."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from inspect import signature
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from fastqt import nn
from fastqt.loss import DECLARED
from tests.shared.every_loss import EVERY_LOSS
from tests.shared.loss_options import N, Options, units, values

OF_LOSSES = {x.name: x for x in DECLARED.values() if x.module is not None}
each = pytest.mark.parametrize("name", sorted(OF_LOSSES))


class Case(NamedTuple):
    """A loss module, its function, the options of both, and the positional and named arguments of a batch."""

    make: type[nn.losses.Loss]
    function: Callable[..., Tensor]
    options: Options
    data: tuple[Any, ...]
    named: Options


@cache
def case(name: str) -> Case:
    """A loss with as many of its options as fit each other, at other values than their defaults."""
    declared, module = OF_LOSSES[name], getattr(nn, OF_LOSSES[name].module or "")
    held = signature(module).parameters
    given = EVERY_LOSS[name].inputs(N, torch.Generator().manual_seed(0), False)
    chosen: Options = {key: float(x) if key in held else x for key, x in given.items()}
    for unit in units(name):
        # A module that is copied, stored and printed has no tensors among its options, nor a generator.
        added = {key: _held(values(name, key)[0]) for key in unit if key not in given}
        has_tensors = any(isinstance(x, Tensor) for key, x in added.items() if key in held)
        if added and not has_tensors and not {"generator", "backend"} & added.keys():
            chosen |= added if _is_taken(declared.function, chosen | added) else {}

    data = [key for key in declared.positional if key in given and key not in held]
    options = {key: x for key, x in chosen.items() if key in held}
    named = {key: x for key, x in chosen.items() if key not in held and key not in data}
    return Case(module, declared.function, options, tuple(chosen[key] for key in data), named)


def _held(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def _is_taken(function: Callable[..., Tensor], arguments: Options) -> bool:
    try:
        function(**arguments)
    except (ValueError, TypeError):
        return False
    return True
