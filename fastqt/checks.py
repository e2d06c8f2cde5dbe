"""Checks of the arguments that users pass to losses.

Each error message names the argument, says what is wanted and what was given.
"""

from __future__ import annotations

import math
from numbers import Real

import torch
from torch import Tensor


def check_option(name: str, value: object, options: tuple[str, ...]) -> None:
    """Raises ValueError unless `value` is one of `options`."""
    if value not in options:
        raise ValueError(f"{name}: want one of {', '.join(map(repr, options))}, got {value!r}")


def input_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which a matrix product would read `x`: autocast's if it is enabled, otherwise x.dtype."""
    if not torch.is_autocast_enabled(x.device.type) or x.dtype is torch.float64:
        return x.dtype
    return torch.get_autocast_dtype(x.device.type)


def check_embeddings(**embeddings: Tensor | None) -> None:
    """Checks that all embeddings are non-empty (rows, D) matrices of one floating-point dtype on one device.

    The first embeddings set D, dtype and device for the others. `row_negatives` must also have as many rows
    as the first.

    Args:
        **embeddings: the arguments under the names that error messages use; None for an absent one.

    Raises:
        ValueError: a wrong shape or device.
        TypeError: not a tensor, or a wrong dtype.
    """
    given = [(name, x) for name, x in embeddings.items() if x is not None]
    first, queries = given[0]
    for name, x in given:
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: want a tensor, got {type(x).__name__}")
        if x.dim() != 2:
            raise ValueError(f"{name}: want shape (rows, D), got {tuple(x.shape)}")
        if not x.dtype.is_floating_point:
            raise TypeError(f"{name}: want a floating-point dtype, got {x.dtype}")
        if x.numel() == 0:
            raise ValueError(f"{name}: want at least one row and one column, got shape {tuple(x.shape)}")
        if x is queries:
            continue
        if x.shape[1] != queries.shape[1]:
            raise ValueError(f"{name}: want D={queries.shape[1]} columns as {first} has, got {x.shape[1]}")
        if x.device != queries.device:
            raise ValueError(f"{name}: want device {queries.device} as {first}, got {x.device}")
        if x.dtype is not queries.dtype and input_dtype(x) != input_dtype(queries):
            raise TypeError(f"{name}: want dtype {queries.dtype} as {first}, got {x.dtype}")
    rows = embeddings.get("row_negatives")
    if rows is not None and rows.shape[0] != queries.shape[0]:
        raise ValueError(
            f"row_negatives: want a row for each of N={queries.shape[0]} queries, got {rows.shape[0]}"
        )


def check_paired(first: str, N: int, name: str, M: int) -> None:
    """Checks that there is a row for each of the N rows that rows of equal index belong to.

    Args:
        first: the argument whose rows each need one.
        N: the number of its rows.
        name: the argument that is checked.
        M: the number of its rows.

    Raises:
        ValueError: M < N.
    """
    if M < N:
        raise ValueError(f"{name}: want at least N={N} rows, one for each row of {first}, got {M}")


def require(condition: Tensor, wanted: str, given: Tensor | None = None) -> None:
    """Raises ValueError unless `condition`, a 0-d bool tensor, is true.

    Reading a condition from a GPU would make the host wait. There, a failed condition triggers an assertion
    on the device instead.

    Args:
        condition: () bool.
        wanted: the message: the argument and what is wanted.
        given: the values that were checked; the message reports their range.
    """
    if condition.is_cuda:
        torch._assert_async(condition, wanted)
    elif not condition:
        raise ValueError(wanted if given is None else f"{wanted}, got {int(given.min())}..{int(given.max())}")


def as_ids(name: str, ids: Tensor) -> Tensor:
    """Converts a 1-D tensor of integers to int64.

    Raises:
        ValueError: `ids` is not 1-D.
        TypeError: `ids` has no integer dtype.
    """
    if ids.dim() != 1:
        raise ValueError(f"{name}: want a 1-D tensor of integers, got shape {tuple(ids.shape)}")
    if ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype is torch.bool:
        raise TypeError(f"{name}: want an integer dtype, got {ids.dtype}")
    return ids.long()


def check_groups(
    query_groups: Tensor | None, candidate_groups: Tensor | None, N: int, M: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Checks the groups of queries (N,) and candidates (M,), and moves both to `device` as int64.

    Raises:
        ValueError: only one of the two is given, or one has a wrong shape.
        TypeError: a dtype that is not an integer one.
    """
    if query_groups is None or candidate_groups is None:
        missing = "query_groups" if query_groups is None else "candidate_groups"
        raise ValueError(f"{missing}: want it together with the other groups, got None")
    groups = as_ids("query_groups", query_groups), as_ids("candidate_groups", candidate_groups)
    for name, ids, length in (("query_groups", groups[0], N), ("candidate_groups", groups[1], M)):
        if ids.numel() != length:
            raise ValueError(f"{name}: want {length} ids, got {ids.numel()}")
    return groups[0].to(device).contiguous(), groups[1].to(device).contiguous()


def check_mask(mask: Tensor, N: int, M: int, device: torch.device) -> None:
    """Checks that `mask` is an (N, M) bool tensor on `device`."""
    if mask.dtype is not torch.bool:
        raise TypeError(f"mask: want dtype torch.bool (True = excluded), got {mask.dtype}")
    if tuple(mask.shape) != (N, M):
        raise ValueError(f"mask: want shape (N, M) = ({N}, {M}), got {tuple(mask.shape)}")
    if mask.device != device:
        raise ValueError(f"mask: want device {device} as queries, got {mask.device}")


def check_scale(scale: float | Tensor) -> None:
    """Checks that `scale` is a finite number or a 0-d floating-point tensor.

    The value of a tensor is checked later, where it is used, because reading it from a GPU makes the host
    wait.
    """
    if isinstance(scale, Tensor) and scale.dim() == 0 and scale.dtype.is_floating_point:
        return
    check_number("scale", scale, "a 0-d tensor")


def check_bias(bias: float | Tensor, M: int, device: torch.device) -> None:
    """Checks that `bias` is a finite number, or a floating-point tensor () or (M,) on `device`."""
    if isinstance(bias, Tensor) and tuple(bias.shape) in ((), (M,)) and bias.dtype.is_floating_point:
        if bias.device != device:
            raise ValueError(f"bias: want device {device} as queries, got {bias.device}")
        return
    check_number("bias", bias, f"a tensor of shape () or ({M},)")


def check_number(name: str, value: object, alternative: str | None = None) -> None:
    """Checks that `value` is a finite number. `alternative` says what else the argument may be."""
    wanted = "a number" if alternative is None else f"a number or {alternative}"
    if isinstance(value, Tensor):
        raise ValueError(
            f"{name}: want {wanted}, floating point, got shape {tuple(value.shape)}, dtype {value.dtype}"
        )
    if isinstance(value, bool) or not isinstance(value, (int, float, Real)):
        raise TypeError(f"{name}: want {wanted}, got {type(value).__name__}")
    if not math.isfinite(value):
        raise ValueError(f"{name}: want a finite number, got {value}")


def check_not_recorded(function: str) -> None:
    """Raises RuntimeError if autograd is recording the backward pass that calls this.

    Autograd records a backward pass for a double backward, which would silently give wrong gradients.

    Args:
        function: the public function's name, for the message.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{function} is differentiable once; a double backward (create_graph=True) needs "
            "backend='reference', if the function has it"
        )


def is_traced(*tensors: Tensor) -> bool:
    """Whether the computation must go through dispatched operators, so that a tracer sees it.

    That is so under `torch.compile` and for tensor subclasses such as fake tensors. Otherwise the operators
    are called directly, because dispatch makes a call several times as expensive.
    """
    return torch.compiler.is_compiling() or any(type(x) not in (Tensor, torch.nn.Parameter) for x in tensors)
