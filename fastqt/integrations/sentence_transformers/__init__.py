"""fastqt's losses in the trainer of the `sentence_transformers` library (the extra `st`)."""

from typing import TYPE_CHECKING

from fastqt.integrations.sentence_transformers.columns import CachedLoss, SentenceTransformerLoss

if TYPE_CHECKING:
    from fastqt.integrations.sentence_transformers.gist import CachedGISTEmbedLoss, GISTEmbedLoss

__all__ = ["CachedGISTEmbedLoss", "CachedLoss", "GISTEmbedLoss", "SentenceTransformerLoss"]

if not TYPE_CHECKING:  # for a type checker, a name that is not imported above is an error

    def __getattr__(name: str) -> object:
        """Subclasses of the library's own losses, which import the library when they are first used."""
        if name in ("CachedGISTEmbedLoss", "GISTEmbedLoss"):
            from fastqt.integrations.sentence_transformers import gist

            return getattr(gist, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
