"""Numbers of rows that wait: the largest score of a row, the sum of its exponentials, and its logarithm.

Programs take the largest score off before they exponentiate, and the logarithm of the sum afterwards. In a
loss the one cancels, and the other is a part of it. They are computed where a program wants the numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastqt.promises.promise import known
from fastqt.promises.rules import View
from fastqt.promises.scores import Meaning, RowTerms, Scores, replace
from fastqt.promises.state import Function, State

T = Tensor


class Largest:
    """The largest cell of each row of scores, (N, 1), through which no gradient flows."""

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        self.compute = compute

    def computed(self) -> Tensor:
        return self.compute()

    def detached(self) -> Largest:
        return self


class LogSumExp:
    """The logsumexp of each row of scores, (N, 1).

    Attributes:
        scores: to whose rows nothing is added.
        compute: gives it.
        state: of the modes of torch in which it is computed.
    """

    def __init__(self, scores: Scores, compute: Callable[[], Tensor], state: State) -> None:
        self.scores, self.compute, self.state = scores, compute, state
        self.tensor: Tensor | None = None

    def computed(self) -> Tensor:
        if self.tensor is None:
            with self.state.modes(grad=self.state.grad):
                self.tensor = self.compute()
        return self.tensor

    def detached(self) -> LogSumExp:
        return LogSumExp(self.scores.detached(), lambda: self.computed().detach(), self.state)


@dataclass(eq=False, kw_only=True)
class RowTerm(Meaning):
    """A number for each row.

    Attributes:
        size: (N, 1) or (N,).
        terms: what it is, or its logarithm.
        is_exp: whether they are its logarithm.
        is_constant: whether it is what its terms are for gradients, too.
        part: computes the tensor; None where that is up to the program's own function.
        by: the call of fastqt that does so.
    """

    name = "a number of each row"
    is_matrix = False
    waits = True
    size: tuple[int, ...]
    terms: RowTerms
    dtype: torch.dtype | None = None
    is_exp: bool = False
    is_constant: bool = True
    part: Callable[[], Tensor] | None = None
    by: str = ""

    def __post_init__(self) -> None:
        self.comes_first = self.part is not None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.size

    def detached(self) -> RowTerm:
        part = self.part
        without = None if part is None else lambda: part().detach()
        return replace(self, terms=self.terms.detached(), part=without, is_constant=True)

    def value(self) -> Tensor | None:
        return None if self.part is None else self.part().reshape(self.size)


# By function what it makes of numbers that wait.
RULES_OF_TERMS: dict[Function, Function] = {}


def rule(*several: Function) -> Callable[[Function], Function]:
    def add(rule: Function) -> Function:
        RULES_OF_TERMS.update(dict.fromkeys(several, rule))
        return rule

    return add


def _view(x: Any, **changes: Any) -> Any:
    """A tensor that shares its memory with the numbers."""
    term = known(x, RowTerm)
    if term is None or x.box.base is not None:
        return NotImplemented
    return View(replace(term, part=None, comes_first=False, **changes))


@rule(T.detach, torch.detach)
def detached(x: Any) -> Any:
    term = known(x, RowTerm)
    return NotImplemented if term is None else _view(x, terms=term.terms.detached(), is_constant=True)


@rule(T.unsqueeze, torch.unsqueeze)
def with_a_column(x: Any, dim: Any) -> Any:
    is_row = known(x, RowTerm) is not None and len(x.shape) == 1 and dim in (1, -1)
    return _view(x, size=(x.shape[0], 1)) if is_row else NotImplemented


@rule(T.view, T.reshape)
def shaped(x: Any, *sizes: Any) -> Any:
    is_column = sizes in ((-1, 1), (x.shape[0], 1))
    return _view(x, size=(x.shape[0], 1)) if is_column and known(x, RowTerm) is not None else NotImplemented


@rule(T.__getitem__)
def indexed(x: Any, where: Any) -> Any:
    is_column = type(where) is tuple and where == (slice(None), None) and len(x.shape) == 1
    return _view(x, size=(x.shape[0], 1)) if is_column and known(x, RowTerm) is not None else NotImplemented


@rule(T.log, torch.log)
def logarithm(x: Any) -> Any:
    term = known(x, RowTerm)
    if term is None or not term.is_exp or torch.is_autocast_enabled(x.device.type):
        return NotImplemented
    dtype = x.dtype
    return replace(
        term, is_exp=False, part=lambda: term.terms.computed().to(dtype), comes_first=True, dtype=dtype
    )


@rule(T.sub, torch.sub, T.__sub__, T.subtract, torch.subtract)
def taken_off(s: Any, x: Any) -> Any:
    """Scores less a number of each row."""
    scores, term = known(s, Scores), known(x, RowTerm)
    if scores is None or term is None or term.is_exp or not term.is_constant:
        return NotImplemented
    if term.size != (scores.shape[0], 1) or s.dtype != x.dtype or not scores.takes_rows:
        return NotImplemented
    for sign, one in term.terms.terms:
        scores = scores.plus(-sign, one)
    return scores
