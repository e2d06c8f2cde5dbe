"""What the classes that take the place of the library's own have in common."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Iterable
from importlib import import_module
from numbers import Number
from typing import Any, SupportsIndex

from torch import Tensor

from fastqt.checks import check_number, check_size, shown

# Arguments of the library's losses, by what they have to be.
MODELS = ("model", "guide")
NUMBERS = ("scale", "temperature", "margin", "hardness_strength")
NO_MODEL = (type(None), str, Number, list, tuple, dict)


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
            cls.__init__ = _checked(vars(cls).get("__init__"), theirs[0].__init__)  # type: ignore[method-assign]

    def extra_repr(self) -> str:
        """What `print(loss)` adds, since the class and its module have the library's names."""
        theirs: str = super().extra_repr()  # type: ignore[misc]  # that of nn.Module, a base of the subclasses
        return ", ".join(filter(None, ("computed by fastqt", theirs)))

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        kind = type(self)
        if "held_by" not in vars(kind):
            return super().__reduce_ex__(protocol)
        return _new, (self.held_by, kind.__name__), self.__dict__


def _check_argument(name: str, value: object) -> None:
    """Raises TypeError or ValueError for what their constructors fail at without a word of the argument.

    All else is left to them. A model may be a stand-in, so only what is no object of that kind is refused.
    """
    if name in MODELS and isinstance(value, NO_MODEL):
        raise TypeError(f"{name}: want a SentenceTransformer, got {shown(value)}")
    if name in NUMBERS and not isinstance(value, Tensor):
        check_number(name, value)
    # Of a number of tokens that is too small the library says so itself.
    if name == "mini_batch_size" or (
        name == "mini_batch_num_tokens" and type(value) not in (int, type(None))
    ):
        check_size(name, value)
    if name == "directions" and value is not None and not isinstance(value, Iterable):
        raise TypeError(f"directions: want a sequence of names, got {shown(value)}")
    if name == "hardness_mode" and not isinstance(value, Hashable):
        raise TypeError(f"hardness_mode: want a name or None, got {shown(value)}")


def _checked(ours: Callable[..., None] | None, theirs: Callable[..., None]) -> Callable[..., None]:
    """The constructor of a class, with their signature, which names arguments that their own fails at."""
    signature = inspect.signature(theirs)
    names = signature.parameters.keys()

    @functools.wraps(theirs)
    def construct(self: Any, *args: Any, **options: Any) -> None:
        try:
            arguments = signature.bind(self, *args, **options).arguments
        except TypeError:  # which the call itself raises, too
            arguments = {}
        reads_model = "mini_batch_size" in names or "guide" in names
        for name, value in arguments.items():
            if reads_model or name not in MODELS:  # The other constructors take any model, and None.
                _check_argument(name, value)
        (ours or theirs)(self, *args, **options)

    return construct


def _new(module: str, name: str) -> Any:
    # Its own `__new__` may warn that the class is deprecated, as was said when the first one was made.
    return object.__new__(getattr(import_module(module), name))
