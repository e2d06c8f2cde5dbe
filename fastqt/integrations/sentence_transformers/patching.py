"""Puts fastqt's losses in the place of the library's own, for scripts that one does not want to edit."""

from __future__ import annotations

import sys
from importlib import import_module
from types import TracebackType
from typing import Any

from fastqt.integrations._libraries import load_library

PACKAGE = "fastqt.integrations.sentence_transformers"
LOSSES = (
    "sentence_transformers.sentence_transformer.losses",
    "sentence_transformers.multi_vector_encoder.losses",
)


def patch() -> Patch:
    """Replaces the library's losses by the classes of this package that have their names.

    Each name that a module holds one of them by is set: in the library's modules
    (`sentence_transformers.losses`, `sentence_transformers.sentence_transformer.losses`,
    `sentence_transformers.multi_vector_encoder.losses`, and the modules in these), and in all others that
    have been imported, such as a notebook that has imported the name. What it does not reach are losses that
    were made before, classes that were derived before (as the library's SparseMultipleNegativesRankingLoss
    is), and what functions, containers and classes hold.

    `fastqt.integrations.sentence_transformers.REPLACEMENTS` names the classes. Call it before a script runs:

        import runpy, fastqt.integrations.sentence_transformers as st
        with st.patch():
            runpy.run_path("train.py", run_name="__main__")

    Returns:
        What undoes it: by `undo()`, or as a context manager at the end of a `with`.

    Raises:
        ImportError: the library is not installed, or older than version 6.

    Example:
        >>> from sentence_transformers import losses
        >>> from fastqt.integrations.sentence_transformers import patch
        >>> with patch():
        ...     losses.MultipleNegativesRankingLoss.__mro__[1].__name__
        'Replacement'
    """
    load_library("sentence_transformers")
    replacements: dict[str, str] = import_module(PACKAGE).REPLACEMENTS
    theirs = {name: kind for module in map(import_module, LOSSES) for name, kind in vars(module).items()}
    # All are imported first: they are made from what the library has.
    ours = {name: getattr(import_module(f"{PACKAGE}.{home}"), name) for name, home in replacements.items()}
    places: list[tuple[Any, str, Any, Any]] = []
    for name, replacement in ours.items():
        original = theirs[name]
        if original is not replacement:
            names = _names_of(original, set(replacements.values()))
            places += [(module, held, original, replacement) for module, held in names]
    for module, held, _, replacement in places:
        setattr(module, held, replacement)
    return Patch(places)


class Patch:
    """A replacement of classes that can be undone.

    Attributes:
        replaced: the full names that hold other classes, such as
            "sentence_transformers.losses.MultipleNegativesRankingLoss".

    Example:
        >>> from fastqt.integrations.sentence_transformers import patch
        >>> replacement = patch()
        >>> any(name.endswith(".MultipleNegativesRankingLoss") for name in replacement.replaced)
        True
        >>> "losses.MultipleNegativesRankingLoss is fastqt's" in str(replacement)
        True
        >>> replacement.undo()
        >>> replacement
        nothing is replaced
    """

    def __init__(self, places: list[tuple[Any, str, Any, Any]]) -> None:
        self._places = places
        self.replaced = sorted(f"{module.__name__}.{name}" for module, name, *_ in places)

    def __repr__(self) -> str:
        return "".join(f"{name} is fastqt's\n" for name in self.replaced) or "nothing is replaced"

    def undo(self) -> None:
        """Sets all names to what they were, but for those that hold something else again."""
        for module, name, original, replacement in self._places:
            if vars(module).get(name) is replacement:
                setattr(module, name, original)
        self._places, self.replaced = [], []

    def __enter__(self) -> Patch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.undo()


def _names_of(original: type, homes: set[str]) -> list[tuple[Any, str]]:
    """The modules that hold a class, and the names that they hold it by.

    Not the modules here, which derive their classes from the library's.
    """
    replacements = {f"{PACKAGE}.{home}" for home in homes}
    names = []
    for module in {id(x): x for name, x in list(sys.modules.items()) if name not in replacements}.values():
        held = getattr(module, "__dict__", None)
        if isinstance(held, dict):
            names += [(module, name) for name, value in list(held.items()) if value is original]
    return names
