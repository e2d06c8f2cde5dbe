"""Rows that a program brings to norm 1: promises, because the losses of fastqt have cosines of any rows.

`F.normalize(x)` and `x / x.norm(dim=-1, keepdim=True)` are not computed. What they promise can be turned,
multiplied by a number and detached. A product of two of them is of x. When a program asks anything else of
them, they become the tensors that its own functions give.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastqt.norms import LEAST_NORM
from fastqt.promises import closed
from fastqt.promises.notes import are_norms
from fastqt.promises.promise import Promise, known
from fastqt.promises.rules import View
from fastqt.promises.scores import UnitRows, is_number, replace
from fastqt.promises.state import autocast_of
from fastqt.torch_modes import PLAIN

T = Tensor


def _normalized(input: Any = None, p: Any = 2.0, dim: Any = 1, eps: Any = 1e-12, out: Any = None) -> Any:
    """The rows that `F.normalize` brings to norm 1; None where it does something else."""
    is_of_rows = type(dim) is int and dim in (1, -1) and eps == LEAST_NORM
    return input if is_of_rows and p == 2 and out is None and _is_matrix(input) else None


def _over_norms(x: Any = None, norms: Any = None, **named: Any) -> Any:
    """The rows that are divided by their norms, of which none is nearly 0."""
    if named or not _is_matrix(x) or not are_norms(norms, x):
        return None
    return x if bool((norms > LEAST_NORM).all()) else None


def _is_matrix(x: Any) -> bool:
    return type(x) in PLAIN and x.dim() == 2 and x.is_floating_point()


# By function what gives the rows that it brings to norm 1.
NORMALIZED: dict[Callable[..., Any], Callable[..., Any]] = {F.normalize: _normalized} | dict.fromkeys(
    (T.div, torch.div, T.__truediv__, T.true_divide, torch.true_divide, T.divide, torch.divide), _over_norms
)


def unit_rows(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> UnitRows | None:
    """What a function promises that brings rows to norm 1."""
    x = NORMALIZED[func](*args, **kwargs)
    if x is None or autocast_of(x.device.type) is not None:
        return None
    rows = UnitRows(x, x)
    return rows if torch.is_grad_enabled() else rows.detached()


def rows_of(x: Any) -> UnitRows | None:
    """What is promised of rows, with those that have norm 1; None of other tensors."""
    rows: UnitRows | None = known(x, UnitRows)
    return rows if rows is None or rows.unit is not None else replace(rows, unit=x.box.state)


def _turned(x: Any, *dims: Any) -> Any:
    rows = rows_of(x)
    is_turned = rows is not None and x.box.base is None and (not dims or closed.turns(dims))
    return View(replace(rows, turned=not rows.turned)) if rows is not None and is_turned else NotImplemented


def _multiplied(x: Any, y: Any) -> Any:
    x, factor = (x, y) if isinstance(x, Promise) else (y, x)
    rows = rows_of(x)
    if (
        rows is None
        or not is_number(factor)
        or (isinstance(factor, Tensor) and factor.dtype != rows.of.dtype)
    ):
        return NotImplemented
    both = factor if not isinstance(rows.factor, Tensor) and rows.factor == 1 else rows.factor * factor
    return replace(rows, factor=both)


def _detached(x: Any) -> Any:
    rows = rows_of(x)
    return NotImplemented if rows is None or x.box.base is not None else View(rows.detached())


RULES_OF_ROWS: dict[Callable[..., Any], Callable[..., Any]] = {
    **dict.fromkeys((*closed.TURNS, *closed.TURNS_BY_DIMS), _turned),
    **dict.fromkeys((T.mul, torch.mul, T.__mul__, T.__rmul__, T.multiply, torch.multiply), _multiplied),
    **dict.fromkeys((T.detach, torch.detach), _detached),
}
