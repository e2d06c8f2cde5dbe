"""Sums over rows of log-probabilities times weights, which wait for the sum or the mean of all of them.

Programs divide them by the number of a row's positives and take their mean. When it is known what each row
counts, gradients are computed in the forward pass, with three products of matrices; a row's own sum takes
four. When a program asks anything else of the sums, they become the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastqt.devices import accumulation_dtype
from fastqt.promises.ends.arguments import like
from fastqt.promises.ends.weights import LogLikelihoods
from fastqt.promises.promise import Promise, known
from fastqt.promises.rules import View
from fastqt.promises.scores import Meaning, replace
from fastqt.promises.state import Function

T = Tensor


@dataclass(eq=False, kw_only=True)
class RowSums(Meaning):
    """The sum of each row, times a number of its own.

    Attributes:
        size: (N,), or that of a view of it.
        of: the sums.
        factor: what they are multiplied by, a number or (N,) without a gradient.
        comes_first: whether it is what a function of scores gives, and not the program's arithmetic of that.
    """

    name = "a sum of each row"
    is_matrix = False
    waits = True
    by = "fastqt.contrastive_loss"
    size: tuple[int, ...]
    dtype: torch.dtype | None
    of: LogLikelihoods
    factor: float | Tensor = 1.0
    comes_first: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        return self.size

    def detached(self) -> RowSums:
        of = self.of
        scores = of.scores.detached()
        options = {name: x.detach() if isinstance(x, Tensor) else x for name, x in of.options.items()}
        return replace(self, of=LogLikelihoods(scores, options, of.weights, of.targets))

    def value(self) -> Tensor | None:
        rows = self.of.rows()
        return None if rows is NotImplemented else (rows * self.factor).to(self.dtype).reshape(self.size)


# By function what it makes of sums that wait.
RULES_OF_SUMS: dict[Function, Function] = {}


def rule(*several: Function) -> Callable[[Function], Function]:
    def add(rule: Function) -> Function:
        RULES_OF_SUMS.update(dict.fromkeys(several, rule))
        return rule

    return add


@rule(T.mul, torch.mul, T.__mul__, T.__rmul__, T.multiply, torch.multiply)
def multiplied(x: Any, y: Any = None, **named: Any) -> Any:
    x, y = (x, y) if isinstance(x, Promise) else (y, x)
    factor = None if named else _factor(y, x)
    return NotImplemented if factor is None else _times(x, factor)


@rule(T.div, torch.div, T.__truediv__, T.true_divide, torch.true_divide, T.divide, torch.divide)
def divided(x: Any, y: Any = None, **named: Any) -> Any:
    factor = None if named or not isinstance(x, Promise) else _factor(y, x)
    is_zero = factor is None or (not isinstance(factor, Tensor) and factor == 0)
    if factor is None or is_zero:
        return NotImplemented
    return _times(x, factor.reciprocal() if isinstance(factor, Tensor) else 1 / factor)


@rule(T.neg, torch.neg, T.__neg__, T.negative, torch.negative)
def negated(x: Any) -> Any:
    return multiplied(x, -1.0)


def _factor(y: Any, x: Promise) -> float | Tensor | None:
    """A number, or one for each sum, (N,), that these may be multiplied by; None of anything else."""
    if type(y) in (int, float):
        return float(y)
    sums = known(x, RowSums)
    if type(y) is not Tensor or sums is None or y.requires_grad or y.device != x.box.state.device:
        return None
    is_alike = torch.promote_types(y.dtype, x.box.dtype) == x.box.dtype
    if not is_alike or tuple(y.shape) not in ((), sums.size):
        return None
    # A copy, because a program may change its tensor.
    return y.to(accumulation_dtype(y.device), copy=True).expand(sums.size).reshape(-1)


def _times(x: Promise, factor: float | Tensor) -> RowSums:
    sums: RowSums = known(x, RowSums)
    is_one = not isinstance(sums.factor, Tensor) and sums.factor == 1
    return replace(sums, factor=factor if is_one else sums.factor * factor, comes_first=False)


@rule(T.view, T.reshape, torch.reshape)
def shaped(x: Any, *sizes: Any, **named: Any) -> Any:
    """All sums in another shape, which shares their memory."""
    sums = known(x, RowSums)
    flat = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], tuple | list) else sizes
    if sums is None or named or x.box.base is not None or not all(type(n) is int for n in flat):
        return NotImplemented
    count, rest = math.prod(sums.size), math.prod(n for n in flat if n != -1)
    unknown = list(flat).count(-1)
    if unknown > 1 or rest < 1 or (count % rest if unknown else count != rest):
        return NotImplemented
    size = tuple(count // rest if n == -1 else n for n in flat)
    return View(replace(sums, size=size, comes_first=False))


@rule(T.sum, torch.sum)
def total(x: Any, dim: Any = None, **named: Any) -> Any:
    sums = known(x, RowSums)
    is_of_all = dim is None or (sums is not None and len(sums.size) == 1 and dim in (0, -1))
    if sums is None or named or not is_of_all:
        return NotImplemented
    sign = _sign_of(sums.factor) if isinstance(sums.factor, Tensor) else 1.0
    if sign is None:
        return NotImplemented
    x.box.state.check()
    return like(sums.of.total(sums.factor, sign), x, False)


@rule(T.mean, torch.mean)
def mean(x: Any, dim: Any = None, **named: Any) -> Any:
    of_all = total(x, dim, **named)
    return of_all if of_all is NotImplemented else of_all / math.prod(known(x, RowSums).size)


def _sign_of(factor: Tensor) -> float | None:
    """That of all numbers; None where one is not finite, or above 0 where another one is below."""
    least, most = torch.stack(factor.aminmax()).tolist()
    if not (-math.inf < least and most < math.inf) or least < 0 < most:
        return None
    return -1.0 if least < 0 else 1.0
