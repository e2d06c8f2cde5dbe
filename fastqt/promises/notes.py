"""How the block has seen a tensor being made, by which a product knows what it is of.

Programs write both directions of CLIP as `t * a @ b.T` and `t * b @ a.T`. The matrices of these products are
four tensors. By the notes both are t times the products of a and b.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastqt.promises.scores import is_number

_TURN = {Tensor.t, torch.t, *(getattr(Tensor, name).__get__ for name in ("T", "mT"))}
_MULTIPLY = {Tensor.mul, torch.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.multiply, torch.multiply}
_NORMS = {Tensor.norm, torch.norm, torch.linalg.norm, torch.linalg.vector_norm}
NOTED = {*_TURN, *_MULTIPLY, *_NORMS, torch.arange}
_PLAIN = (Tensor, torch.nn.Parameter)


class Origin(NamedTuple):
    """A matrix that was made of another one, by a number or by turning it, or the norms of its rows."""

    of: Tensor
    factor: float | Tensor
    how: str
    versions: tuple[int, int, int]  # of the matrix, the other one and the number, when it was made

    def holds_for(self, x: Tensor) -> bool:
        """Whether the matrix is still made so, and nobody asks for its own gradient."""
        if x._backward_hooks or x.retains_grad or (x.requires_grad and x.is_leaf):
            return False
        has_gradient = self.of.requires_grad or (
            isinstance(self.factor, Tensor) and self.factor.requires_grad
        )
        return x.requires_grad is has_gradient and self.versions == _versions(x, self.of, self.factor)


# By the id of a tensor the tensor, and its origin, or for the numbers of rows, 0 to n - 1, its version.
_notes: dict[int, tuple[weakref.ref[Tensor], Any]] = {}


def note(function: Callable[..., Any], args: Any, kwargs: dict[str, Any], answer: Any) -> None:
    """Notes how a function of `NOTED` has made its answer."""
    if type(answer) is not Tensor:
        return
    if function is torch.arange:
        if len(args) == 1 and kwargs.keys() <= {"device"} and answer.dtype == torch.int64:
            _keep(answer, answer._version)
        return
    if answer.dim() != 2 or not answer.is_floating_point():
        return

    factor: float | Tensor = 1.0
    if function in _NORMS:
        how, of = "norms", args[0]
        if not _are_of_rows(*args[1:], **kwargs):
            return
    elif kwargs:
        return
    elif function in _TURN:
        how, of = "turned", args[0]
    else:
        how = "times"
        of, factor = args if isinstance(args[0], Tensor) and args[0].dim() == 2 else args[::-1]
    if type(of) in _PLAIN and is_number(factor) and of.dtype == answer.dtype:
        _keep(answer, Origin(of, factor, how, _versions(answer, of, factor)))


def _are_of_rows(*options: Any, **named: Any) -> bool:
    """Whether these options of a norm are of Euclid's, of each row in a column."""
    options_of = {**dict(zip(("p", "dim", "keepdim"), options, strict=False)), **named}
    order = options_of.pop("p", options_of.pop("ord", None))
    is_euclidean = order in (None, "fro") or (type(order) in (int, float) and order == 2)
    dim = options_of.pop("dim", None)
    is_row = type(dim) is int and dim in (1, -1) and options_of.pop("keepdim", False) is True
    return is_euclidean and is_row and not any(x is not None for x in options_of.values())


def _keep(x: Tensor, noted: Any) -> None:
    key = id(x)
    _notes[key] = weakref.ref(x, lambda _: _notes.pop(key, None)), noted


def _noted(x: Tensor) -> Any:
    of_x = _notes.get(id(x))
    return None if of_x is None or of_x[0]() is not x else of_x[1]


def _versions(x: Tensor, of: Tensor, factor: float | Tensor) -> tuple[int, int, int]:
    return x._version, of._version, factor._version if isinstance(factor, Tensor) else 0


def _origin(x: Tensor, how: str) -> Origin | None:
    origin = _noted(x)
    return origin if isinstance(origin, Origin) and origin.how == how and origin.holds_for(x) else None


def are_row_numbers(x: Tensor) -> bool:
    """Whether the numbers are 0 to n - 1; without waiting for a device where the block saw them made."""
    if _noted(x) == x._version:
        return True
    are_numbers = torch.equal(x, torch.arange(x.shape[0], device=x.device))
    if are_numbers:
        _keep(x, x._version)
    return are_numbers


def are_norms(x: Any, of: Tensor) -> bool:
    """Whether it is known to be the norm of each row of a matrix, (N, 1)."""
    origin = _origin(x, "norms") if type(x) is Tensor else None
    return origin is not None and origin.of is of


def unturned(x: Tensor) -> Tensor:
    """The transposed matrix: the tensor of which it was made, if that is known."""
    origin = _origin(x, "turned")
    return x.T if origin is None else origin.of


def without_factor(x: Tensor) -> tuple[Tensor, float | Tensor]:
    """The matrix without the number by which another one was multiplied, and this number."""
    origin = _origin(x, "times")
    return (x, 1.0) if origin is None else (origin.of, origin.factor)
