"""fastqt's losses in the trainer of the `sentence_transformers` library (the extra `st`).

The classes that take the place of the library's own of the same name are subclasses of these, and are
imported when they are first used, so that this module can be imported without the library.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from fastqt.integrations.sentence_transformers.columns import CachedLoss, SentenceTransformerLoss

if TYPE_CHECKING:
    from fastqt.integrations.sentence_transformers.gist import CachedGISTEmbedLoss, GISTEmbedLoss

# The library's classes that have a replacement of the same name here, and the module that holds it.
REPLACEMENTS = {
    "GISTEmbedLoss": "gist",
    "CachedGISTEmbedLoss": "gist",
}

__all__ = [
    "REPLACEMENTS",
    "CachedGISTEmbedLoss",
    "CachedLoss",
    "GISTEmbedLoss",
    "SentenceTransformerLoss",
]

if not TYPE_CHECKING:  # for a type checker, a name that is not imported above is an error

    def __getattr__(name: str) -> object:
        """Imports a replacement; Python calls this for names that the module does not hold yet."""
        if name not in REPLACEMENTS:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{REPLACEMENTS[name]}"), name)
