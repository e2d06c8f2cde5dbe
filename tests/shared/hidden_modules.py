"""Callables that use a module which they are not: the ways in which they hold it."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable

import torch
from torch import Tensor, nn

REGISTRY: dict[str, nn.Module] = {}


def registered(x: Tensor) -> Tensor:
    return REGISTRY["encoder"](x)


def decorated(function: Callable) -> Callable:
    @functools.wraps(function)
    def call(*args, **options):
        return function(*args, **options)

    return call


class Trainer:
    def __init__(self, model: nn.Module, other: nn.Module | None = None) -> None:
        self.model, self.other = model, other

    def encode(self, x: Tensor) -> Tensor:
        return self.model(x)

    def encode_other(self, x: Tensor) -> Tensor:
        return self.other(x)


class Callee(Trainer):
    def __call__(self, x: Tensor) -> Tensor:
        return self.encode(x)


class Slots:
    __slots__ = ("model",)

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, x: Tensor) -> Tensor:
        return self.model(x)


class Unregistered(nn.Module):
    """Keeps its encoder where `modules()` does not find it."""

    def __init__(self, model: nn.Module, form: str) -> None:
        super().__init__()
        self.box = [model] if form == "list" else lambda x: model(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.box[0](x) if isinstance(self.box, list) else self.box(x)


def from_class(model: nn.Module) -> Callable:
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


def with_default(model: nn.Module) -> Callable:
    def call(x, used=model):
        return used(x)

    return call


def with_keyword_default(model: nn.Module) -> Callable:
    def call(x, *, used=model):
        return used(x)

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


# By name: what makes a callable that uses a module.
HIDDEN: dict[str, Callable[[nn.Module], Callable]] = {
    "method": lambda model: Trainer(model).encode,
    "class method": from_class,
    "object": Callee,
    "object with slots": Slots,
    "attribute of attributes": lambda model: functools.partial(
        lambda space, x: space.a.b(x), types.SimpleNamespace(a=types.SimpleNamespace(b=model))
    ),
    "container in a lambda": lambda model: (lambda box: lambda x: box[0](x))([model]),
    "function in a function": lambda model: lambda x: sum((lambda y: model(y))(z) for z in [x]),
    "function of a function": lambda model: (lambda inner: lambda x: inner(x))(lambda x: model(x)),
    "partial of a method": lambda model: functools.partial(Trainer(model).encode),
    "decorated method": lambda model: decorated(Trainer(model).encode),
    "wrapped by a C function": lambda model: functools.lru_cache(maxsize=None)(Trainer(model).encode),
    "registry": from_registry,
    "default value": with_default,
    "keyword's default value": with_keyword_default,
    "attribute of a function": with_attribute,
    "compiled function": lambda model: torch.compile(Trainer(model).encode, backend="eager"),
    "list in a module": lambda model: Unregistered(model, "list"),
    "function in a module": lambda model: Unregistered(model, "function"),
    "replaced forward": with_forward_replaced,
}
