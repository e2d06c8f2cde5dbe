"""Operators of a problem, which no tracer looks into: an argument for each field, by its name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastqt.fields import Differentiable, parts_of, places_of, with_values

# How the schema of an operator writes the types of fields. A number that may be a tensor becomes one, as a
# tracer would compile a loss again for each value of a number.
TYPES = {
    "Tensor": "Tensor",
    "Tensor | None": "Tensor?",
    "float | Tensor": "Tensor",
    "float": "float",
    "bool": "bool",
    "int": "SymInt",
    "str": "str",
    "tuple[int, ...]": "int[]",
    "tuple[float, ...]": "float[]",
}
STR_OR_INT = "str | int"  # Two arguments, of which one is None.

# It takes a problem and the other arguments of an operator, and returns tensors.
OfProblem = Callable[..., list[Tensor]]


class Operators:
    """What operators of the problems of a class have in common.

    Args:
        kind: the class, a dataclass with fields of the types above.
    """

    def __init__(self, kind: Any) -> None:
        self._kind, self._parts, self._places = kind, parts_of(kind), places_of(kind)
        arguments = []
        for _, name, type_ in self._places:
            if type_ == STR_OR_INT:
                arguments += [f"str? {name}", f"int? {name}_number"]
            else:
                arguments.append(f"{TYPES[type_]} {name}")
        self._schema = ", ".join(arguments)

    def define(self, name: str, more: str, function: OfProblem, fake: OfProblem) -> Callable[..., Any]:
        """Registers the operator `fastqt::<name>` and returns it.

        Args:
            name: of the operator.
            more: the schema of its arguments after those of the problem.
            function: computes the tensors that it returns.
            fake: makes tensors like these, without values.
        """
        operator = f"fastqt::{name}"
        torch.library.define(operator, f"({self._schema}, {more}) -> Tensor[]")
        torch.library.impl(operator, "CompositeExplicitAutograd", self.of_arguments(function))
        torch.library.register_fake(operator, self.of_arguments(fake))
        made: Callable[..., Any] = getattr(torch.ops.fastqt, name)
        return made

    def arguments(self, p: Any) -> list[Any]:
        """A problem as the operators take it."""
        arguments: list[Any] = []
        for part, name, type_ in self._places:
            value = getattr(p if part is None else getattr(p, part), name)
            if type_ == STR_OR_INT:
                arguments += (value, None) if isinstance(value, str) else (None, value)
            elif type_ == "float | Tensor" and not isinstance(value, Tensor):
                # As a product: in that a tracer keeps a number as a variable, and elsewhere as a constant.
                arguments.append(torch.ones((), dtype=torch.float64, device="cpu") * value)
            else:
                arguments.append(value)
        return arguments

    def of_arguments(self, function: OfProblem) -> OfProblem:
        """A function of a problem as one of an operator's arguments."""

        def flat(*arguments: Any) -> list[Tensor]:
            rest = iter(arguments)
            values = []
            for _, _, type_ in self._places:
                value = next(rest)
                if type_ == STR_OR_INT:
                    number = next(rest)
                    value = number if value is None else value
                values.append(value)
            return function(with_values(self._kind, self._parts, self._places, values), *rest)

        return flat


def as_tensors(gradients: Sequence[Tensor | None], p: Differentiable) -> list[Tensor]:
    """One tensor a gradient, of the input's dtype and device, and empty where none is wanted."""
    return [
        p.queries.new_empty(0) if g is None or x is None else g.to(x)
        for g, x in zip(gradients, p.inputs(), strict=True)
    ]


def fake_gradients(p: Differentiable, needs: Iterable[bool | None]) -> list[Tensor]:
    """What `as_tensors` makes, without values."""
    gradients = [
        torch.empty(x.shape, dtype=x.dtype, device=x.device) if need and x is not None else None
        for x, need in zip(p.inputs(), needs, strict=True)
    ]
    return as_tensors(gradients, p)


def wanted(tensors: Sequence[Tensor], needs: Iterable[bool | None]) -> tuple[Tensor | None, ...]:
    """The gradients of which `as_tensors` has made tensors, with None where these are empty."""
    return tuple(g if need else None for g, need in zip(tensors, needs, strict=True))
