"""How the block has seen a tensor being made, by which a product knows what it is of.

Programs write both directions of CLIP as `t * a @ b.T` and `t * b @ a.T`. The matrices of these products are
four tensors. By the notes both are t times the products of a and b.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from fastqt.promises.scores import is_number

_TURN = {Tensor.t, torch.t, *(getattr(Tensor, name).__get__ for name in ("T", "mT"))}
_MULTIPLY = {Tensor.mul, torch.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.multiply, torch.multiply}
NOTED = {*_TURN, *_MULTIPLY, torch.arange}
_PLAIN = (Tensor, torch.nn.Parameter)


class Origin(NamedTuple):
    """A matrix that was made of another one, by a number or by turning it."""

    of: Tensor
    factor: float | Tensor
    turned: bool
    versions: tuple[int, int, int]  # of the matrix, the other one and the number, when it was made

    def holds_for(self, x: Tensor) -> bool:
        """Whether the matrix is still made so, and nobody asks for its own gradient."""
        if x._backward_hooks or x.retains_grad or (x.requires_grad and x.is_leaf):
            return False
        is_complete = x.requires_grad == any(
            y.requires_grad for y in (self.of, self.factor) if isinstance(y, Tensor)
        )
        return is_complete and self.versions == _versions(x, self.of, self.factor)


# By a tensor its origin, or for the numbers of rows, 0 to n - 1, the tensor's version.
_notes: WeakIdKeyDictionary = WeakIdKeyDictionary()


def note(function: Callable[..., Any], args: Any, kwargs: dict[str, Any], answer: Any) -> None:
    """Notes how a function of `NOTED` has made its answer."""
    if type(answer) is not Tensor:
        return
    if function is torch.arange:
        if len(args) == 1 and kwargs.keys() <= {"device"} and answer.dtype == torch.int64:
            _notes[answer] = answer._version
        return
    if kwargs or answer.dim() != 2 or not answer.is_floating_point():
        return
    if function in _TURN:
        (of,) = args
        factor: float | Tensor = 1.0
    else:
        of, factor = args if isinstance(args[0], Tensor) and args[0].dim() == 2 else args[::-1]
    if type(of) in _PLAIN and is_number(factor) and of.dtype == answer.dtype:
        _notes[answer] = Origin(of, factor, function in _TURN, _versions(answer, of, factor))


def _versions(x: Tensor, of: Tensor, factor: float | Tensor) -> tuple[int, int, int]:
    return x._version, of._version, factor._version if isinstance(factor, Tensor) else 0


def are_row_numbers(x: Tensor) -> bool:
    """Whether the numbers are 0 to n - 1; without waiting for a device where the block saw them made."""
    if _notes.get(x) == x._version:
        return True
    return torch.equal(x, torch.arange(len(x), device=x.device))


def unturned(x: Tensor) -> Tensor:
    """The transposed matrix: the tensor of which it was made, if that is known."""
    matrix = _turned_of(x)
    return x.T if matrix is None else matrix


def _turned_of(x: Tensor) -> Tensor | None:
    origin = _notes.get(x)
    is_turned = isinstance(origin, Origin) and origin.turned and origin.holds_for(x)
    return origin.of if is_turned else None


def without_factor(x: Tensor) -> tuple[Tensor, float | Tensor]:
    """The matrix without the number by which another one was multiplied, and this number."""
    origin = _notes.get(x)
    is_scaled = isinstance(origin, Origin) and not origin.turned and origin.holds_for(x)
    return (origin.of, origin.factor) if is_scaled else (x, 1.0)


def sources_of(x: Tensor) -> tuple[Tensor, ...]:
    """The tensors of which products with the matrix are, to which all of its gradient goes."""
    turned = _turned_of(x)
    matrix, factor = without_factor(x if turned is None else turned)
    return (matrix, factor) if isinstance(factor, Tensor) else (matrix,)
