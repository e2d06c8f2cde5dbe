"""Checks of the arguments that users pass to losses.

Each error message names the argument, says what is wanted and what was given, and where a call makes the one
of the other, which.
Values of a wrong type or dtype raise TypeError, all others that are wrong ValueError.
"""

from __future__ import annotations

import math
import sys
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from fastqt.devices import has_assertions
from fastqt.torch_modes import input_dtype, is_traced

FLOAT32_MAX = torch.finfo(torch.float32).max
FLOATING = frozenset((torch.float64, torch.float32, torch.bfloat16, torch.float16))
INTEGERS = frozenset(getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64))


def shown(value: object) -> str:
    """A value as an error message of one line shows it: tensors and other large objects by their type."""
    text = repr(value)
    return text if len(text) <= 60 and text.isprintable() else type(value).__name__


def check_option(name: str, value: object, options: tuple[str, ...]) -> None:
    """Raises ValueError unless `value` is one of `options`."""
    if not isinstance(value, str) or value not in options:
        raise ValueError(f"{name}: want one of {', '.join(map(repr, options))}, got {shown(value)}")


def check_flag(name: str, value: object) -> None:
    """Raises TypeError unless `value` is a bool: a text such as "no" would count as True."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: want True or False, got {shown(value)}")


def check_size(name: str, value: object, least: int = 1) -> None:
    """Checks that `value` is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: want an integer, got {shown(value)}")
    if value < least:
        raise ValueError(f"{name}: want at least {least}, got {value}")


def check_dropout(dropout: float) -> None:
    """Checks that `dropout` is a probability in [0, 1)."""
    check_number("dropout", dropout)
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout: want a probability in [0, 1), got {dropout}")


def check_tensor(name: str, x: object) -> None:
    """Checks that `x` is a strided tensor, which holds a number for each of its cells.

    One on the meta device has no values and is refused with ValueError; compilers' fake tensors may pass.
    """
    if not isinstance(x, Tensor):
        advice = "; convert it by torch.as_tensor" if _holds_numbers(x) else ""
        raise TypeError(f"{name}: want a tensor, got {type(x).__name__}{advice}")
    if x.layout is not torch.strided or x.is_nested:
        kind = "a nested tensor" if x.is_nested else f"layout {x.layout}; convert it by to_dense()"
        raise TypeError(f"{name}: want a dense tensor of layout torch.strided, got {kind}")
    if x.is_meta and not torch.compiler.is_compiling():
        raise ValueError(
            f"{name}: want a tensor with values, got one on the device meta; load the model's weights first"
        )


def _holds_numbers(x: object) -> bool:
    """Whether torch makes a tensor of this."""
    return hasattr(x, "__array__") or (isinstance(x, list) and bool(x) and isinstance(x[0], (int, float)))


def check_embeddings(optional: tuple[str, ...] = (), /, **embeddings: Tensor | None) -> None:
    """Checks that all embeddings are non-empty (rows, D) matrices of one floating-point dtype on one device.

    The first embeddings set D, dtype and device for the others. `row_negatives` must also have as many rows
    as the first, and may be (rows, K, D). Those named in `optional`, not the first, may be None.
    """
    first, queries, D = "", None, 0
    for name, x in embeddings.items():
        if x is None and name in optional:
            continue
        check_tensor(name, x)
        assert x is not None
        if type(x) is not Tensor and hasattr(x, "placements"):
            raise ValueError(
                f"{name}: want a tensor, or group= of the ranks that hold its rows, got a DTensor of "
                f"placements {tuple(x.placements)}; full_tensor() gathers it"
            )

        shape, dtype = x.shape, x.dtype
        if len(shape) != 2 and not (name == "row_negatives" and len(shape) == 3):
            wanted = "(N, D) or (N, K, D)" if name == "row_negatives" else "(rows, D)"
            advice = "flatten the dimensions before the last, or pool over them"
            if len(shape) == 1:
                labels = queries is not None and dtype in INTEGERS
                advice = (
                    "give embeddings, not scores and labels" if labels else "make a row of it by unsqueeze(0)"
                )
            raise ValueError(f"{name}: want shape {wanted}, got {tuple(shape)}; {advice}")

        if dtype not in FLOATING:
            advice = "; convert it by float()" if dtype in INTEGERS else ""
            raise TypeError(f"{name}: want a floating-point dtype of 16 to 64 bits, got {dtype}{advice}")
        if 0 in shape:
            raise ValueError(
                f"{name}: want at least one row and one column, got shape {tuple(shape)}; skip such a batch"
            )

        if queries is None:
            first, queries, D = name, x, shape[1]
            continue
        if shape[-1] != D:
            raise ValueError(f"{name}: want D={D} columns as {first} has, got {shape[-1]}")
        if x.device != queries.device:
            raise ValueError(
                f"{name}: want device {queries.device} as {first}, got {x.device}; move it by to()"
            )
        if dtype is not queries.dtype and input_dtype(x) != input_dtype(queries):
            raise TypeError(f"{name}: want dtype {queries.dtype} as {first}, got {dtype}; convert it by to()")

    rows = embeddings.get("row_negatives")
    if rows is not None and queries is not None and rows.shape[0] != queries.shape[0]:
        raise ValueError(
            f"row_negatives: want a row for each of N={queries.shape[0]} queries, got {rows.shape[0]}"
        )


def check_paired(first: str, N: int, name: str, M: int) -> None:
    """Checks that `name` has a row for each of the N rows of `first`: rows of equal index are a pair."""
    if M < N:
        raise ValueError(f"{name}: want at least N={N} rows, one for each row of {first}, got {M}")


def require(condition: Tensor, wanted: str, given: Tensor | None = None, **sizes: int) -> None:
    """Raises ValueError with `wanted` unless `condition`, a 0-d bool tensor, is true.

    The names of `sizes` in braces stand for these in the text. A compiled graph says the names: with the
    sizes in its text it would be a graph for these alone.

    Reading a condition from a GPU would make the host wait, and under torch.compile it would break the graph.
    There, a failed condition triggers an assertion on the device instead, which on a CPU is a RuntimeError.
    For a device that cannot assert the host waits.
    The message reports the range of `given`, the values that were checked.
    """
    if is_traced(condition) or (not condition.is_cpu and has_assertions(condition.device.type)):
        for name in sizes:
            wanted = wanted.replace("{" + name + "}", name)
        torch._assert_async(condition, wanted)
    elif not condition:
        wanted = wanted.format(**sizes) if sizes else wanted
        raise ValueError(wanted if given is None else f"{wanted}, got {int(given.min())}..{int(given.max())}")


def check_mask(name: str, mask: Tensor, N: int, M: int | None, device: torch.device) -> None:
    """Checks that `mask` is an (N, M) bool tensor on `device`; None for an M that is not known yet."""
    check_tensor(name, mask)
    if mask.dtype is not torch.bool:
        raise TypeError(
            f"{name}: want dtype torch.bool (True = excluded), got {mask.dtype}; convert it by bool()"
        )
    if mask.dim() != 2 or len(mask) != N or M not in (None, mask.shape[1]):
        columns = "M" if M is None else M
        raise ValueError(f"{name}: want shape (N, M) = ({N}, {columns}), got {tuple(mask.shape)}")
    if mask.device != device:
        raise ValueError(f"{name}: want device {device} as queries, got {mask.device}")


def check_scale(scale: float | Tensor, dtype: torch.dtype = torch.float64) -> None:
    """Checks that `scale` is a positive number, or a 0-d floating-point tensor.

    The value of a tensor is checked later, where it is used, because reading it from a GPU makes the host
    wait. Embeddings of all dtypes but float64 are computed in float32 at most, which has to hold a number.
    """
    if type(scale) is float and 0 < scale <= FLOAT32_MAX:  # what nearly every call has
        return
    if isinstance(scale, Tensor):
        check_tensor("scale", scale)
        if scale.dim() == 0 and scale.dtype in FLOATING:
            return
    if isinstance(scale, float) and not math.isfinite(scale):
        raise ValueError(f"scale: want a finite number, which is 1 / temperature, got {scale}")
    check_number("scale", scale, "a 0-d tensor", dtype)
    if scale <= 0:
        raise ValueError(f"scale: want a positive number, which is 1 / temperature, got {scale}")


def check_bias(bias: float | Tensor, M: int, device: torch.device, dtype: torch.dtype) -> None:
    """Checks that `bias` is a finite number, or a floating-point tensor () or (M,), on `device`."""
    if isinstance(bias, Tensor):
        check_tensor("bias", bias)
        if bias.device != device:
            raise ValueError(f"bias: want device {device} as queries, got {bias.device}")
        if tuple(bias.shape) in ((), (M,)) and bias.dtype in FLOATING:
            return
    alternative = None if type(bias) is float else f"a tensor of shape () or ({M},)"
    check_number("bias", bias, alternative, dtype)


def check_number(
    name: str, value: object, alternative: str | None = None, dtype: torch.dtype = torch.float64
) -> None:
    """Checks that `value` is a finite number, which float32 holds unless the embeddings' `dtype` is float64.

    `alternative` is what else the argument may be, for the message.
    """
    if type(value) is float and abs(value) <= FLOAT32_MAX:  # what nearly every call has
        return
    wanted = "a number" if alternative is None else f"a number or {alternative}"
    if isinstance(value, Tensor):
        one = value.numel() == 1 and value.dim() > 0 and alternative is not None
        advice = "; make it 0-d by squeeze()" if one else ""
        raise ValueError(
            f"{name}: want {wanted}, floating point of 16 to 64 bits, got shape {tuple(value.shape)}, "
            f"dtype {value.dtype}{advice}"
        )
    if isinstance(value, bool) or not isinstance(value, (int, float, Real)):
        raise TypeError(f"{name}: want {wanted}, got {type(value).__name__}")
    # Python compares integers of any size with a float exactly; inf and NaN are not below it. numpy's numbers
    # of few bits would round the limit to theirs, and warn.
    size: Any = abs(value) if isinstance(value, int | float) else abs(_as_float(value))
    if not size <= sys.float_info.max:
        raise ValueError(f"{name}: want a finite number, got {value}")
    if dtype is not torch.float64 and size > FLOAT32_MAX:
        raise ValueError(f"{name}: want a number that float32 holds, at most {FLOAT32_MAX:.4g}, got {value}")


def _as_float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def check_backward(function: str, *upstream: Tensor) -> None:
    """Raises RuntimeError for a backward pass of `function`, which calls this, that it cannot make.

    Autograd records a backward pass for a double backward, which would silently give wrong gradients. With
    several upstream gradients at once, vmap has wrapped them, and no engine can read them.
    """
    if torch.is_grad_enabled():
        raise once_differentiable_error(function)
    if not torch.compiler.is_compiling() and any(map(is_batched, upstream)):
        raise RuntimeError(
            f"{function}: want one upstream gradient in a backward pass, got several at once, as of "
            "jacobian(vectorize=True) and is_grads_batched=True; want torch.func.jacrev of the loss, "
            "or backend='reference', if the function has it"
        )


def is_batched(x: Tensor) -> bool:
    """Whether a tensor is vmap's, of `torch.func` or of before it."""
    of_torch = torch._C._functorch
    return of_torch.is_batchedtensor(x) or of_torch.is_legacy_batchedtensor(x)


def once_differentiable_error(function: str) -> RuntimeError:
    """The error for second derivatives and for forward-mode differentiation."""
    return RuntimeError(
        f"{function} is differentiable once and in reverse mode; a double backward (create_graph=True), "
        "a derivative of torch.func.grad and forward mode need backend='reference', if the function has it"
    )
