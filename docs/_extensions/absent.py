"""Stands in for libraries that fastqt integrates and that are not installed, so that the site is built without them.

The integrations derive classes from those of these libraries, which a reference of fastqt's names does not show.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any


class _Name(type):
    """The type of a name of an absent library, which is a class whatever it is in the library."""

    def __getattr__(cls, name: str) -> Any:
        # A class of fastqt that is derived from one of these has its own attributes alone.
        if name.startswith("__") or not cls.__dict__.get("is_absent"):
            raise AttributeError(name)
        return _name(f"{cls.__module__}.{cls.__name__}", name)


def _name(module: str, name: str) -> type:
    return _Name(name, (), {"__module__": module, "is_absent": True})


class _Module(ModuleType):
    __path__: list[str] = []  # noqa: RUF012  # a package, of which any module may be imported

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _name(self.__name__, name)
        setattr(self, name, value)
        return value


class _Absent(MetaPathFinder, Loader):
    """Finds the modules of absent libraries."""

    def __init__(self, libraries: Sequence[str]) -> None:
        self.libraries = libraries

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        is_absent = name.partition(".")[0] in self.libraries
        return ModuleSpec(name, self, is_package=True) if is_absent else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing: a module makes its names when they are asked for."""


def stand_in_for(*libraries: str) -> None:
    """From now on these libraries can be imported; those that are installed are what they are."""
    absent = [name for name in libraries if find_spec(name) is None]
    if absent:
        sys.meta_path.append(_Absent(absent))
