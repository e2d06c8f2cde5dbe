"""The modules that a callable uses.

They are found by what its code names: nothing is called and no property is read, so that looking changes
nothing. Where code spells out a path, as in `trainer.encoder(x)`, its end alone counts. Where it uses an
object as a whole, as in `encode(trainer, x)`, everything that the object holds counts.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Iterator
from contextvars import ContextVar
from functools import cached_property, partial, partialmethod
from inspect import CO_VARARGS
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any

from torch import Tensor, nn

from fastqt.cached.paths import imports_of, paths_of

# What these name for themselves holds no modules of a user.
LIBRARIES = frozenset({"torch", "fastqt", *sys.stdlib_module_names}) - {"__main__"}
# Of the standard library, those with objects that hold what a user gave them.
HOLDERS = frozenset({"collections", "functools", "types", "weakref"})
PYTHON_CALLABLES = (FunctionType, MethodType, partial)
C_CALLABLES = (BuiltinFunctionType, MethodWrapperType, type)
CONTAINERS = (dict, list, tuple, set, frozenset, deque)
HOLDING = (ContextVar, MappingProxyType, *CONTAINERS, *PYTHON_CALLABLES)
WHOLE_SCOPE = frozenset({"globals", "eval", "exec"})  # with these code may use any global
NOT_USES = frozenset({"__init__", "__new__", "__init_subclass__", "__del__", "__repr__", "__reduce__"})
LARGE = 1000  # A container of more is data: nobody encodes by so many modules.
MISSING = object()


def modules_of(name: str, encoder: object) -> list[nn.Module]:
    """The modules that a callable uses, the outer ones of modules that its code names.

    Looked through are closures, default values, globals, attributes, containers, functools.partial,
    `__wrapped__`, objects that methods are bound to, and functions that are named in turn. TypeError for a
    callable that is compiled, so that its modules cannot be found.
    """
    search = _Search()
    if not isinstance(encoder, (nn.Module, *PYTHON_CALLABLES)) and search.add_call(encoder):
        pass  # its attributes count where the code of its __call__ uses them
    elif _can_be_looked_into(encoder):
        search.add(encoder)
    else:
        raise TypeError(
            f"{name}: want a module, a Python function or a Python object, whose modules can be found, "
            f"got {type(encoder).__name__}; give a function that names the modules and calls it"
        )
    search.run()
    return search.modules


def _can_be_looked_into(encoder: object) -> bool:
    """Whether a callable that has no `__call__` in Python is of a kind whose modules are known."""
    return (
        isinstance(encoder, (nn.Module, *PYTHON_CALLABLES, *C_CALLABLES))
        or "__wrapped__" in _held(encoder)
        or _library_of(type(encoder).__module__) == "torch"
    )


class _Search:
    """What is left to look at, and the modules found until now."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self._seen: dict[Any, object] = {}  # by identity; the values keep identities from being used again
        self._left: deque[object] = deque()

    def add(self, value: object) -> None:
        """Everything that a value holds or uses is to be looked at."""
        if id(value) not in self._seen:
            self._seen[id(value)] = value
            self._left.append(value)

    def run(self) -> None:
        while self._left:
            self._look_at(self._left.popleft())

    def _look_at(self, value: Any) -> None:
        if _is_gone(value):
            return

        if isinstance(value, nn.Module):
            self._add_module(value)
        elif isinstance(value, FunctionType):
            self.follow(value)
        elif isinstance(value, MethodType):
            if isinstance(value.__self__, nn.Module):
                self.add(value.__self__)
            if isinstance(value.__func__, FunctionType):
                self.follow(value.__func__, value.__self__)
            else:
                self._add_all(value.__func__, value.__self__)
        elif isinstance(value, partial | partialmethod):
            self._add_all(value.func, *value.args, *value.keywords.values())
        elif isinstance(value, staticmethod | classmethod):
            self.add(value.__func__)
        elif isinstance(value, weakref.ref):
            self.add(value())
        elif isinstance(value, ContextVar):
            self.add(value.get(None))
        elif isinstance(value, MappingProxyType):
            self.add(dict(value))
        elif isinstance(value, BuiltinFunctionType | MethodWrapperType):
            self.add(value.__self__)
        elif not isinstance(value, (Tensor, ModuleType, type, str, bytes)):
            self._add_contents(value)

    def _add_all(self, *values: object) -> None:
        for value in values:
            self.add(value)

    def _add_module(self, module: nn.Module) -> None:
        """A module, and those that its parts use without having registered them."""
        self.modules.append(module)
        parts = list(module.modules())
        self._seen |= {id(part): part for part in parts}
        for part in parts:
            forward = vars(part).get("forward")
            if forward is not None:
                self.add(forward)
                continue
            forward = _in_class(type(part), "forward")
            if isinstance(forward, FunctionType) and _library_of(forward.__module__) is None:
                self.follow(forward, part)

    def _add_contents(self, value: Any) -> None:
        """The elements of a container, and the attributes of an object of a user's class."""
        if isinstance(value, dict) and len(value) <= LARGE:
            self._add_all(*dict.values(value))
        elif isinstance(value, CONTAINERS) and not isinstance(value, dict) and len(value) <= LARGE:
            self._add_all(*value)
        library = _library_of(type(value).__module__)
        if library is None or library in HOLDERS:
            self._add_all(*_attributes(value))
            for base in type(value).__mro__:
                if _library_of(base.__module__) is None:
                    self._add_class(base, value)
            self.add_call(value)

    def _add_class(self, cls: type, receiver: object) -> None:
        """What a class holds for its objects, and the methods by which operators and statements use one."""
        for name, value in vars(cls).items():
            if not isinstance(value, FunctionType):
                self.add(value)
            elif name.startswith("__") and name not in NOT_USES:
                self.follow(value, receiver)

    def add_call(self, value: object) -> bool:
        """Looks at what runs where an object is called, and says whether that is code in Python."""
        call = _in_class(type(value), "__call__")
        if isinstance(call, FunctionType):
            self.follow(call, value)
        elif isinstance(call, (nn.Module, staticmethod, classmethod, partialmethod, *PYTHON_CALLABLES)):
            self._add_all(call, value)
        else:
            return False
        return True

    def follow(self, function: FunctionType, receiver: object = MISSING) -> None:
        """Looks at what a function's code names, which is called with `receiver` as its first argument."""
        key = (id(function), id(receiver))
        if key in self._seen:
            return
        self._seen[key] = (function, receiver)
        self._add_all(*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        self._add_all(*vars(function).values())

        code = function.__code__
        values = dict(_enclosing(function))
        if receiver is not MISSING and (code.co_argcount or code.co_flags & CO_VARARGS):
            place = 0 if code.co_argcount else code.co_kwonlyargcount
            values[code.co_varnames[place]] = receiver if code.co_argcount else (receiver,)
        names: dict[str, Any] = function.__globals__
        is_library = _library_of(names.get("__name__")) is not None
        for path in paths_of(code):
            if not path.is_global:
                self._walk(values.get(path.root), path.attributes)
            elif not is_library and path.root in names:
                self._walk(names[path.root], path.attributes)
            elif path.root == "super" and receiver is not MISSING:
                self._follow_bases(code, receiver)
            elif path.root in WHOLE_SCOPE and not is_library:
                self.add(names)
        if not is_library:
            self._add_imported(code, str(names.get("__package__")))

    def _add_imported(self, code: CodeType, package: str) -> None:
        """What code may take from the modules that it imports itself."""
        paths = {f"{prefix}{name}".strip(".") for name in imports_of(code) for prefix in ("", f"{package}.")}
        left = [sys.modules[path] for path in paths if isinstance(sys.modules.get(path), ModuleType)]
        for module in left:
            held = {} if _library_of(module.__name__) else vars(module)
            for value in (held[name] for name in code.co_names if name in held):
                if isinstance(value, ModuleType) and value not in left:
                    left.append(value)
                self.add(value)

    def _follow_bases(self, code: CodeType, receiver: object) -> None:
        """Looks at the methods that code may mean by `super()`."""
        cls = receiver if isinstance(receiver, type) else type(receiver)
        for base in cls.__mro__[1:]:
            for name in code.co_names:
                method = vars(base).get(name)
                method = method.__func__ if isinstance(method, classmethod) else method
                if isinstance(method, FunctionType) and _library_of(base.__module__) is None:
                    self.follow(method, receiver)

    def _walk(self, value: Any, attributes: tuple[str, ...]) -> None:
        """Looks at the end of a path, and at the code that runs on the way."""
        for name in attributes:
            value = self._attribute(value, name)
            if value is MISSING:
                return
        self.add(value)

    def _attribute(self, owner: Any, name: str) -> Any:
        """An attribute, or MISSING where code would be run for it, which is looked at, or a whole is used."""
        if isinstance(owner, ModuleType):
            return MISSING if _library_of(owner.__name__) else vars(owner).get(name, MISSING)
        if isinstance(owner, nn.Module):
            if name in owner._modules:
                return owner._modules[name]
            if name in owner._parameters or name in owner._buffers:
                return MISSING

        raw = _in_class(type(owner), name)
        if not isinstance(owner, type):
            held = _held(owner)
            if name in held:
                return held[name]
            if isinstance(raw, MemberDescriptorType):
                return _slot(raw, owner)
            if not isinstance(owner, nn.Module) and not isinstance(raw, (FunctionType, cached_property)):
                self._add_hooks(owner, raw)

        if isinstance(owner, (nn.Module, *HOLDING)) and not isinstance(raw, property):
            self.add(owner)
        return self._attribute_of_class(owner, name)

    def _add_hooks(self, owner: object, raw: object) -> None:
        """Code of a user that runs where an attribute is read, and what it is given."""
        for holder, name in ((owner, "__getattribute__"), (raw, "__get__")):
            hook = _in_class(type(holder), name)
            if isinstance(hook, FunctionType):
                self._add_all(MethodType(hook, holder), owner, raw)

    def _attribute_of_class(self, owner: Any, name: str) -> Any:
        """An attribute of an object's class; where that is code, MISSING, and the code is looked at."""
        cls = owner if isinstance(owner, type) else type(owner)
        raw: Any = _in_class(cls, name)
        if raw is MISSING:
            raw = MISSING if isinstance(owner, nn.Module) else _in_class(cls, "__getattr__")

        if isinstance(raw, property):
            raw = raw.fget
        elif isinstance(raw, cached_property):
            raw = raw.func

        if isinstance(raw, FunctionType):
            self.follow(raw, MISSING if isinstance(owner, type) else owner)
        elif isinstance(raw, classmethod) and isinstance(raw.__func__, FunctionType):
            self.follow(raw.__func__, cls)
        elif isinstance(raw, partialmethod) and isinstance(raw.func, FunctionType):
            self.follow(raw.func, owner)
            self.add(raw)
        elif isinstance(raw, staticmethod):
            self.add(raw)
        else:
            return raw
        return MISSING


def _library_of(module: str | None) -> str | None:
    """The library that a Python module belongs to, None for a user's."""
    root = (module or "").partition(".")[0]
    return root if root in LIBRARIES else None


def _enclosing(function: FunctionType) -> Iterator[tuple[str, object]]:
    """The names from enclosing functions, with their values."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # a name that has no value yet
            continue


def _attributes(value: Any) -> list[Any]:
    """What an object itself holds."""
    slots = [
        x for base in type(value).__mro__ for x in vars(base).values() if isinstance(x, MemberDescriptorType)
    ]
    return [*_held(value).values(), *(_slot(slot, value) for slot in slots)]


def _held(value: Any) -> dict[str, Any]:
    """An object's own names and values, without those of slots."""
    if isinstance(_in_class(type(value), "__dict__"), property):
        return {}
    held: dict[str, Any] = getattr(value, "__dict__", {})
    return held


def _is_gone(value: Any) -> bool:
    """Whether this is a weak proxy of what no longer exists, of which nothing can be asked."""
    try:
        isinstance(value, nn.Module)
    except ReferenceError:
        return True
    return False


def _slot(slot: Any, value: Any) -> Any:
    try:
        return slot.__get__(value)
    except AttributeError:  # a slot that has no value yet
        return MISSING


def _in_class(cls: type, name: str) -> Any:
    """What a class or one of its bases has under a name, without calling any of it."""
    return next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), MISSING)
