"""Stands in for optional libraries that are not installed, so that the site is built without them.

The reference imports the integrations and the evaluation. What these import is larger than all else that
the site needs, and nothing of it is shown.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from sphinx.application import Sphinx

LIBRARIES = (
    "datasets",
    "lightning",
    "pyarrow",
    "pytorch_metric_learning",
    "scipy",
    "sentence_transformers",
    "sklearn",
    "transformers",
)


class _Name(type):
    """The type of a name of an absent library, which is a class whatever it is in the library."""

    def __getattr__(cls, name: str) -> Any:
        # A class of fastqt that is derived from one of these has its own attributes alone.
        if name.startswith("__") or not cls.__dict__.get("is_absent"):
            raise AttributeError(name)
        return _name(f"{cls.__module__}.{cls.__name__}", name)


def _name(module: str, name: str) -> type:
    # Some class of a library is deprecated, and what replaces it repeats the library's words.
    return _Name(name, (), {"__module__": module, "__deprecated__": "deprecated", "is_absent": True})


class Module(ModuleType):
    __path__: list[str] = []  # noqa: RUF012  # a package, of which any module may be imported

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _name(self.__name__, name)
        setattr(self, name, value)
        return value


class Absent(MetaPathFinder, Loader):
    """Finds the modules of absent libraries."""

    def __init__(self, libraries: Sequence[str]) -> None:
        self.libraries = libraries

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        is_absent = name.partition(".")[0] in self.libraries
        return ModuleSpec(name, self, is_package=True) if is_absent else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing: a module makes its names when they are asked for."""


def setup(app: Sphinx) -> dict[str, Any]:
    """From now on all of `LIBRARIES` can be imported; those that are installed are what they are."""
    absent = [name for name in LIBRARIES if find_spec(name) is None]
    if absent:
        sys.meta_path.append(Absent(absent))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
