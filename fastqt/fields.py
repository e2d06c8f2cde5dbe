"""What follows from the fields of a problem's class, by their names.

A problem is a dataclass, and some of its fields are dataclasses too, such as targets. These are its parts.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, TypeAlias, get_type_hints

import torch
from torch import Tensor


class Differentiable:
    """A problem whose class says of which of its fields there are gradients.

    Attributes:
        queries: (N, D): the loss has a row for each.
        needs_type: a named tuple whose fields are named as those of the problem.
    """

    queries: Tensor
    needs_type: ClassVar[type[Any]]

    _values: ClassVar[Any]  # picks the inputs of a problem
    _place_of_scale: ClassVar[int | None]

    def __init_subclass__(cls) -> None:
        if "needs_type" in vars(cls):
            names = cls.needs_type._fields
            cls._values = attrgetter(*names)
            cls._place_of_scale = names.index("scale") if "scale" in names else None

    def inputs(self) -> tuple[Tensor | None, ...]:
        """What gradients can flow to, in the order of `needs_type`; None for a number."""
        if torch.compiler.is_compiling():  # Dynamo traces only what is made where it is used.
            values = list(attrgetter(*self.needs_type._fields)(self))
        else:
            values = list(self._values(self))
        # `isinstance` takes several times as long for a number as for a tensor.
        place = self._place_of_scale
        if place is not None and (type(values[place]) is float or not isinstance(values[place], Tensor)):
            values[place] = None
        return tuple(values)


class Place(NamedTuple):
    """Where a problem has a value: in a field, of the problem itself or of a part of it."""

    part: str | None
    name: str
    type: str

    @property
    def path(self) -> str:
        return f"{self.part}.{self.name}" if self.part else self.name


@functools.cache
def parts_of(kind: Any) -> dict[str, type[Any]]:
    """The fields of a class of problems that are dataclasses themselves, and the classes of these."""
    hints = get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]
    return {name: hints[name] for name in names if dataclasses.is_dataclass(hints[name])}


@functools.cache
def places_of(kind: Any, whole_targets: bool = False) -> list[Place]:
    """Where problems of a class have values, in the order of the fields.

    Args:
        kind: the class.
        whole_targets: whether the targets are one value, and not several.
    """
    parts, places = parts_of(kind), []
    for field in dataclasses.fields(kind):
        if field.name in parts and not (whole_targets and field.name == "targets"):
            inner = dataclasses.fields(parts[field.name])
            places += [Place(field.name, x.name, str(x.type)) for x in inner]
        else:
            places.append(Place(None, field.name, str(field.type)))
    return places


# A problem without its tensors: where it has values, its scale if that is a number, and its options.
Rest: TypeAlias = "tuple[_Layout, float | None, tuple[Any, ...]]"


def without_tensors(p: Any) -> tuple[Rest, tuple[Tensor | None, ...]]:
    """What is left of a problem without its tensors, and these, from which `with_tensors` makes it again.

    An autograd function hands the tensors to `save_for_backward`, which notices changes in place and frees
    them after the backward pass.
    """
    kind: Any = type(p)
    targets = getattr(p, "targets", None)
    layout = _layout(kind, targets is not None and targets.cached)
    tensors = layout.tensors(p)
    if layout.has_scale and not isinstance(p.scale, Tensor):
        return (layout, p.scale, layout.options(p)), tensors[:-1]
    return (layout, None, layout.options(p)), tensors


def with_tensors(rest: Rest, tensors: Sequence[Tensor | None]) -> Any:
    """The problem that `without_tensors` was given."""
    layout, scale, options = rest
    held: tuple[Any, ...] = (*tensors,) if scale is None else (*tensors, scale)
    return with_values(layout.kind, layout.parts, layout.places, (*held, *options))


def with_values(
    kind: Any, parts: Mapping[str, type[Any]], places: Sequence[Place], values: Sequence[Any]
) -> Any:
    """A problem with a value at each of its places.

    Args:
        kind: its class.
        parts: the fields whose values are taken apart, and their classes.
        places: where the values are, in any order.
        values: one for each place.
    """
    p = object.__new__(kind)
    fields = p.__dict__
    for name, part in parts.items():
        fields[name] = object.__new__(part)

    for place, value in zip(places, values, strict=True):
        owner = fields if place.part is None else fields[place.part].__dict__
        owner[place.name] = value
    return p


class _Layout(NamedTuple):
    """Where a class of problems has its tensors and its options."""

    kind: Any
    parts: dict[str, type[Any]]  # that are taken apart
    places: list[Place]  # of tensors, a scale last, and then of options
    has_scale: bool
    tensors: Callable[[Any], tuple[Any, ...]]
    options: Callable[[Any], tuple[Any, ...]]


@functools.cache
def _layout(kind: Any, whole_targets: bool) -> _Layout:
    """The layout of a class of problems; the targets are an option if they stay whole."""
    places = places_of(kind, whole_targets)
    tensors = [place for place in places if "Tensor" in place.type]
    tensors.sort(key=lambda place: place.path == "scale")
    options = [place for place in places if place not in tensors]

    apart = {place.part for place in places}
    parts = {name: part for name, part in parts_of(kind).items() if name in apart}
    has_scale = bool(tensors) and tensors[-1].path == "scale"
    return _Layout(kind, parts, [*tensors, *options], has_scale, getter(tensors), getter(options))


def getter(places: Sequence[Place]) -> Callable[[Any], tuple[Any, ...]]:
    """What reads the values of some places of a problem."""
    paths = [place.path for place in places]
    if len(paths) > 1:
        return attrgetter(*paths)
    return lambda p: tuple(attrgetter(path)(p) for path in paths)
