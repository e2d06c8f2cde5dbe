"""The functions that multiply two matrices, and the rows on both sides of their products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastqt.promises.notes import unturned, without_factor
from fastqt.promises.promise import Promise
from fastqt.promises.scores import Product, Promised, equal, replace
from fastqt.promises.state import autocast_of
from fastqt.promises.unit import rows_of


class Side(NamedTuple):
    """One side of a product.

    Attributes:
        rows: (N, D).
        sources: what its gradients go to, beside what is promised.
        source: the program's own tensor of the rows.
        factor: a number that the rows are multiplied by.
        unit: the rows at norm 1, which are then those of the product.
    """

    rows: Tensor
    sources: tuple[Tensor, ...]
    source: Tensor
    factor: float | Tensor = 1.0
    unit: Promised | None = None

    @property
    def is_of_layer(self) -> bool:
        """Whether it is a parameter, or a view of one."""
        base = self.rows._base
        return isinstance(self.rows, torch.nn.Parameter) or isinstance(base, torch.nn.Parameter)


Sides = tuple[Side, Side]


def product_of(queries: Side, candidates: Side) -> Product:
    """The products of the rows of both sides."""
    a, b = queries.rows, candidates.rows
    is_one = equal(candidates.factor, 1.0)
    scale = queries.factor if is_one else candidates.factor * queries.factor
    unit = None
    if queries.unit is not None and candidates.unit is not None:
        unit = queries.unit, candidates.unit
    product = Product(a, b, scale, made_of=(queries.source, candidates.source), unit=unit)
    dtype = autocast_of(a.device.type)
    if dtype is not None:
        product = replace(product, queries=a.to(dtype), candidates=b.to(dtype))
    return product if torch.is_grad_enabled() else product.detached()


def _side(x: Any, *, is_turned: bool) -> Side | None:
    """A matrix of rows, or the transposed one; None of what is none."""
    if type(x) is Promise:
        unit = rows_of(x)
        if unit is None or unit.turned is not is_turned or autocast_of(unit.of.device.type) is not None:
            return None
        return Side(unit.of, (), unit.source, unit.factor, unit.unit)
    if type(x) is not Tensor or x.dim() != 2:
        return None
    rows, factor = without_factor(unturned(x) if is_turned else x)
    return Side(rows, (rows, factor) if isinstance(factor, Tensor) else (rows,), rows, factor)


def _both(a: Side | None, b: Side | None) -> Sides | None:
    return None if a is None or b is None else (a, b)


def _of_matrices(a: Any = None, b: Any = None, **named: Any) -> Sides | None:
    return None if named else _both(_side(a, is_turned=False), _side(b, is_turned=True))


def _of_rows(a: Any = None, b: Any = None, *bias: Any, **named: Any) -> Sides | None:
    """With the rows of the second."""
    if named or any(x is not None for x in bias):
        return None
    return _both(_side(a, is_turned=False), _side(b, is_turned=False))


def _of_vectors(a: Any = None, b: Any = None, **named: Any) -> Sides | None:
    """A vector for each row and one for each column."""
    if named or not all(type(x) is Tensor and x.dim() == 1 for x in (a, b)):
        return None
    rows, columns = a[:, None], b[:, None]
    return Side(rows, (a,), rows), Side(columns, (b,), columns)


def _of_einsum(*args: Any, **named: Any) -> Sides | None:
    if len(args) == 2 and isinstance(args[1], tuple | list):
        args = (args[0], *args[1])
    if named or len(args) != 3 or not isinstance(args[0], str) or "->" not in args[0]:
        return None
    inputs, _, output = args[0].replace(" ", "").partition("->")
    first, _, second = inputs.partition(",")
    if len(first) == len(second) == 1 and output == first + second and first != second:
        return _of_vectors(*args[1:])

    shared = set(first) & set(second)
    if len(first) != 2 or len(second) != 2 or len(set(first + second)) != 3 or len(shared) != 1:
        return None
    if len(output) != 2 or set(output) != set(first + second) - shared:
        return None
    (summed,) = shared
    sides = {
        term.replace(summed, ""): _side(x, is_turned=term[0] == summed)
        for term, x in zip((first, second), args[1:], strict=True)
    }
    return _both(sides[output[0]], sides[output[1]])


def _of_cosines(x1: Any = None, x2: Any = None, dim: Any = 1, eps: Any = 1e-8) -> Sides | None:
    """Each of (N, 1, D) with each of (1, M, D), as torch takes them by their norms."""
    if not all(type(x) is Tensor and x.dim() == 3 for x in (x1, x2)) or dim not in (2, -1):
        return None
    if x1.dtype != x2.dtype or autocast_of(x1.device.type) is not None:
        return None
    turned = x1.shape[0] == 1 and x2.shape[1] == 1
    if not turned and not (x1.shape[1] == 1 and x2.shape[0] == 1):
        return None
    rows, columns = (x2[:, 0], x1[0]) if turned else (x1[:, 0], x2[0])
    queries, candidates = _over_norms(rows, eps), _over_norms(columns, eps)
    return Side(queries, (x1, x2), queries), Side(candidates, (), candidates)


def _over_norms(x: Tensor, eps: float) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(x, dim=1, keepdim=True).clone()
    with torch.no_grad():
        norms.clamp_min_(eps)
    return x / norms


# By function the sides of its product; None of what is no such product.
PRODUCTS: dict[Callable[..., Any], Callable[..., Sides | None]] = {
    **dict.fromkeys((torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__), _of_matrices),
    **dict.fromkeys((torch.inner, Tensor.inner, F.linear), _of_rows),
    **dict.fromkeys((torch.outer, torch.ger, Tensor.outer, Tensor.ger), _of_vectors),
    **dict.fromkeys((F.cosine_similarity, torch.cosine_similarity), _of_cosines),
    torch.einsum: _of_einsum,
}
