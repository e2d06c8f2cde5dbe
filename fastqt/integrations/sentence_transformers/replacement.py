"""What the classes that take the place of the library's own have in common."""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any, SupportsIndex


class Replacement:
    """A subclass of one of the library's losses that model cards show as that one.

    A card names a loss by its class and the module of the class, and links to the library's documentation of
    it. Such a class has therefore the module and the signature of the class that it replaces, and its
    instances are pickled by the module that really holds it.
    """

    held_by: str

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        theirs: list[Any] = [base for base in cls.__mro__[1:] if base.__name__ == cls.__name__]
        if theirs:  # Otherwise it is a user's class.
            cls.held_by, cls.__module__ = cls.__module__, theirs[0].__module__
            if "__init__" in vars(cls):
                functools.update_wrapper(vars(cls)["__init__"], theirs[0].__init__)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        kind = type(self)
        if "held_by" not in vars(kind):
            return super().__reduce_ex__(protocol)
        return _new, (self.held_by, kind.__name__), self.__dict__


def _new(module: str, name: str) -> Any:
    # Its own `__new__` may warn that the class is deprecated, as was said when the first one was made.
    return object.__new__(getattr(import_module(module), name))
