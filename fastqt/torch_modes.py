"""What torch does at the moment that a call has to know: autocast, TF32, tracing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

PLAIN = frozenset((Tensor, torch.nn.Parameter))  # tensors that are no tracer's
# Whether a transform of torch.func is active. A function around it would double what it costs every call.
is_transformed: Callable[[], bool] = torch._C._are_functorch_transforms_active


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """What autocast rounds a matrix product's operands to on the device of `x`; None if it is disabled."""
    kind = "cpu" if x.is_cpu else x.device.type  # which takes longer to ask for
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def input_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which a matrix product would read `x`: autocast's if it is enabled, otherwise x.dtype."""
    if x.dtype is torch.float64:
        return x.dtype
    return autocast_dtype(x) or x.dtype


def tf32_allowed() -> bool:
    """Whether torch is set to multiply float32 matrices in TF32 on a GPU.

    The getters of before torch 2.9 raise once a program has used the setting that this reads, which knows
    what their setters did.
    """
    precision: str = torch.backends.cuda.matmul.fp32_precision
    return precision == "tf32"


def adds_up_in_float16() -> bool:
    """Whether torch is set to add up products of float16 matrices in that dtype on a GPU."""
    allowed: bool = torch.backends.cuda.matmul.allow_fp16_accumulation
    return allowed


def cpu_rounds_float32() -> bool:
    """Whether torch is set to multiply float32 matrices in bfloat16 or TF32 on a CPU that can."""
    # mypy takes the settings of oneDNN for a module, and this one for what a module has not.
    precision: str = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
    return precision not in ("none", "ieee")


def is_traced(*tensors: Tensor) -> bool:
    """Whether the computation must go through dispatched operators, so that a tracer sees it.

    That is so under `torch.compile` and for tensor subclasses such as fake tensors. Otherwise the operators
    are called directly, because dispatch makes a call several times as expensive.
    """
    for x in tensors:
        if type(x) not in PLAIN:
            return True
    return torch.compiler.is_compiling()


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Where operations on tensors such as `x` compute in their own dtypes."""
    # Some types of devices have no autocast that could be turned off.
    return nullcontext() if autocast_dtype(x) is None else torch.autocast(x.device.type, enabled=False)
