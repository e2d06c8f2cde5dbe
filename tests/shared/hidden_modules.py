"""Callables that use a module which they are not: the ways in which code reaches a module."""

from __future__ import annotations

import contextvars
import functools
import sys
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

REGISTRY: dict[str, nn.Module] = {}


def registered(x: Tensor) -> Tensor:
    return REGISTRY["encoder"](x)


def by_globals(x: Tensor) -> Tensor:
    return globals()["REGISTRY"]["encoder"](x)


def decorated(function: Callable) -> Callable:
    @functools.wraps(function)
    def call(*args, **options):
        return function(*args, **options)

    return call


class Trainer:
    """Holds a module, and another one that its methods do not use."""

    def __init__(self, model: nn.Module, other: nn.Module | None = None) -> None:
        self.model, self.other, self.calls = model, other, 0
        self.parts = {"models": [model]}
        self.reference = weakref.ref(model)

    def encode(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self._run(x)

    def _run(self, x: Tensor) -> Tensor:
        return self.model(x)

    def encode_other(self, x: Tensor) -> Tensor:
        return self.other(x)

    def from_parts(self, x: Tensor) -> Tensor:
        return sum(model(x) for model in self.parts["models"])

    def by_text(self, x: Tensor) -> Tensor:
        return getattr(self, "mod" + "el")(x)

    def by_reference(self, x: Tensor) -> Tensor:
        return self.reference()(x)

    @property
    def encoder(self) -> nn.Module:
        return self.model

    @functools.cached_property
    def kept(self) -> nn.Module:
        return self.model

    def from_properties(self, x: Tensor) -> Tensor:
        return self.encoder(x) + 0 * self.kept(x)


class Derived(Trainer):
    def encode(self, x: Tensor) -> Tensor:
        return super().encode(x)


class Callee(Trainer):
    def __call__(self, x: Tensor) -> Tensor:
        return self.encode(x)


class Slots:
    __slots__ = ("model",)

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, x: Tensor) -> Tensor:
        return self.model(x)


@dataclass
class Delegating:
    inner: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Unregistered(nn.Module):
    """Keeps its encoder where `modules()` does not find it."""

    def __init__(self, model: nn.Module, form: str) -> None:
        super().__init__()
        self.box = {"list": [model], "function": lambda x: model(x), "object": Callee(model)}[form]

    def forward(self, x: Tensor) -> Tensor:
        return self.box[0](x) if isinstance(self.box, list) else self.box(x)


def from_class(model: nn.Module) -> Callable:
    """A class that holds the module, and a method of the class."""
    held = model

    class Holder:
        model = held

        @classmethod
        def encode(cls, x):
            return cls.model(x)

    return Holder.encode


def from_registry(model: nn.Module) -> Callable:
    REGISTRY["encoder"] = model
    return registered


def from_globals(model: nn.Module) -> Callable:
    REGISTRY["encoder"] = model
    return by_globals


def with_default(model: nn.Module) -> Callable:
    def call(x, used=model):
        return used(x)

    return call


def with_keyword_default(model: nn.Module) -> Callable:
    def call(x, *, used=model):
        return used(x)

    return call


def with_local_name(model: nn.Module) -> Callable:
    trainer = Trainer(model)

    def call(x):
        used = trainer
        return used.encode(x)

    return call


def with_attribute(model: nn.Module) -> Callable:
    def call(x):
        return call.model(x)

    call.model = model
    return call


def with_forward_replaced(model: nn.Module) -> nn.Module:
    module = nn.Identity()
    module.forward = lambda x: model(x)
    return module


def from_import(model: nn.Module) -> Callable:
    """A function that imports the module itself."""
    sys.modules["module_with_an_encoder"] = types.ModuleType("module_with_an_encoder")
    sys.modules["module_with_an_encoder"].encoder = model

    def call(x):
        from module_with_an_encoder import encoder

        return encoder(x)

    return call


def from_context(model: nn.Module) -> Callable:
    variable = contextvars.ContextVar("encoder")
    variable.set(model)
    return lambda x: variable.get()(x)


class Descriptor:
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __get__(self, owner, cls=None):
        return self.model


def with_descriptor(model: nn.Module) -> Callable:
    class Owner:
        encoder = Descriptor(model)

        def encode(self, x):
            return self.encoder(x)

    return Owner().encode


class Indexed(Trainer):
    def __getitem__(self, name: str) -> nn.Module:
        return self.model


# By name: what makes a callable that uses a module.
HIDDEN: dict[str, Callable[[nn.Module], Callable]] = {
    "method": lambda model: Trainer(model).encode,
    "method of a derived class": lambda model: Derived(model).encode,
    "method that reads containers": lambda model: Trainer(model).from_parts,
    "method that reads a property": lambda model: Trainer(model).from_properties,
    "method that reads by a text": lambda model: Trainer(model).by_text,
    "method that reads a weak reference": lambda model: Trainer(model).by_reference,
    "method that reads a descriptor": with_descriptor,
    "class method": from_class,
    "import in a function": from_import,
    "context variable": from_context,
    "object with an index": lambda model: (lambda held: lambda x: held["encoder"](x))(Indexed(model)),
    "dictionary of weak references": lambda model: (lambda held: lambda x: held["encoder"](x))(
        weakref.WeakValueDictionary(encoder=model)
    ),
    "globals of a function": from_globals,
    "object": Callee,
    "object with slots": Slots,
    "object that delegates": lambda model: Delegating(Trainer(model)).encode,
    "method within a lambda": lambda model: (lambda trainer: lambda x: trainer.encode(x))(Trainer(model)),
    "attribute of attributes": lambda model: functools.partial(
        lambda space, x: space.a.b(x), types.SimpleNamespace(a=types.SimpleNamespace(b=model))
    ),
    "object that delegates within a lambda": lambda model: (lambda proxy: lambda x: proxy.encode(x))(
        Delegating(Trainer(model))
    ),
    "container in a lambda": lambda model: (lambda box: lambda x: box[0](x))([model]),
    "function in a function": lambda model: lambda x: sum((lambda y: model(y))(z) for z in [x]),
    "function of a function": lambda model: (lambda inner: lambda x: inner(x))(lambda x: model(x)),
    "partial of a method": lambda model: functools.partial(Trainer(model).encode),
    "partial of an object": lambda model: functools.partial(Callee.__call__, Callee(model)),
    "decorated method": lambda model: decorated(Trainer(model).encode),
    "wrapped by a C function": lambda model: functools.lru_cache(maxsize=None)(Trainer(model).encode),
    "registry": from_registry,
    "default value": with_default,
    "keyword's default value": with_keyword_default,
    "local name": with_local_name,
    "attribute of a function": with_attribute,
    "compiled function": lambda model: torch.compile(Trainer(model).encode, backend="eager"),
    "list in a module": lambda model: Unregistered(model, "list"),
    "function in a module": lambda model: Unregistered(model, "function"),
    "object in a module": lambda model: Unregistered(model, "object"),
    "replaced forward": with_forward_replaced,
}
