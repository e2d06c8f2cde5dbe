"""The modules that an encoder uses, as far as its objects tell: what it is bound to, encloses and holds.

No code is run and no property is read, so that looking changes nothing. What an encoder does not show is the
user's to say, by `modules=`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from types import CodeType, FunctionType, MemberDescriptorType, MethodType
from typing import Any

from torch import nn

# Globals of their functions and attributes of their objects are no modules of a user.
LIBRARIES = frozenset({"torch", "fastqt", *sys.stdlib_module_names}) - {"__main__", "types"}
CALLABLES = (FunctionType, MethodType, partial)
CONTAINERS = (dict, list, tuple, set, frozenset)
OF_EVERY_MODULE = vars(nn.Module()).keys()
LARGE = 1000  # A container of more is data: nobody encodes by so many modules.


def modules_of(name: str, encoder: object, modules: Sequence[nn.Module] | None) -> list[nn.Module]:
    """An encoder's modules: itself, and those that the user names, or else those that it holds.

    Looked through are attributes, containers, closures, default values, the globals that a function names,
    `functools.partial`, `__wrapped__`, and the objects that methods are bound to. TypeError for a function or
    object in which no module is found, if none are given.
    """
    if modules is not None:
        return list(dict.fromkeys([encoder, *modules] if isinstance(encoder, nn.Module) else modules))
    held = _held_modules(encoder)
    if not held:
        raise TypeError(
            f"{name}: want a module, or a function or object that holds its modules, got "
            f"{type(encoder).__name__} in which none was found; give modules=, the modules that it uses"
        )
    return held


def _held_modules(encoder: object) -> list[nn.Module]:
    modules: list[nn.Module] = []
    seen: dict[int, object] = {}  # by identity; the values keep identities from being used again
    left: list[Any] = [encoder]
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if issubclass(type(value), nn.Module):  # of a weak proxy, which may be dead, nothing is asked
            modules.append(value)
            seen |= {id(part): part for part in value.modules()}
        left += _held_by(value)
    return modules


def _held_by(value: Any) -> Iterable[object]:
    """What an object holds that may be a module or hold one."""
    kind = type(value)
    if issubclass(kind, nn.Module):
        return _unregistered(value)
    if issubclass(kind, FunctionType):
        return _held_by_function(value)
    if issubclass(kind, MethodType):
        return value.__self__, value.__func__
    if issubclass(kind, partial):
        return value.func, *value.args, *value.keywords.values()
    if issubclass(kind, CONTAINERS) and len(value) <= LARGE:
        return list(value.values()) if issubclass(kind, dict) else list(value)
    if _is_library((value if issubclass(kind, type) else kind).__module__):
        return [vars(value)["__wrapped__"]] if "__wrapped__" in getattr(value, "__dict__", ()) else ()
    return _attributes(value)


def _unregistered(module: nn.Module) -> Iterator[object]:
    """The functions and containers among the attributes of a module and its parts."""
    for part in module.modules():
        for name, value in vars(part).items():
            if name not in OF_EVERY_MODULE and issubclass(type(value), (*CALLABLES, *CONTAINERS)):
                yield value


def _held_by_function(function: FunctionType) -> Iterator[object]:
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield from vars(function).values()
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # a name that has no value yet
            continue
    if not _is_library(function.__module__):
        values = function.__globals__
        yield from (values[name] for name in _names(function.__code__) if name in values)


def _names(code: CodeType) -> Iterator[str]:
    """The names of globals and attributes in code, and in the functions within it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _attributes(value: Any) -> Iterator[object]:
    """What an object of a user's class holds, or such a class, but for the methods."""
    if not issubclass(type(value), type):
        yield from getattr(value, "__dict__", {}).values()
    for base in (value if issubclass(type(value), type) else type(value)).__mro__:
        for name, held in () if _is_library(base.__module__) else vars(base).items():
            if issubclass(type(held), MemberDescriptorType):
                yield getattr(value, name, None)
            elif not issubclass(type(held), FunctionType):
                yield held


def _is_library(module: str | None) -> bool:
    return (module or "").partition(".")[0] in LIBRARIES
