"""Hugging Face checkpoints as sentence encoders, and as models of a `transformers.Trainer`."""

from importlib import import_module
from typing import TYPE_CHECKING

from fastqt.integrations.huggingface.decay import without_scale_decay
from fastqt.integrations.huggingface.encoder import POOLINGS, HuggingFaceEncoder, Pooling
from fastqt.integrations.huggingface.loading import CheckpointVocabulary, untrained

if TYPE_CHECKING:
    from fastqt.integrations.huggingface.collator import ContrastiveCollator
    from fastqt.integrations.huggingface.trainer import ContrastiveModel, ContrastiveOutput

__all__ = [
    "POOLINGS",
    "CheckpointVocabulary",
    "ContrastiveCollator",
    "ContrastiveModel",
    "ContrastiveOutput",
    "HuggingFaceEncoder",
    "Pooling",
    "untrained",
    "without_scale_decay",
]

# ContrastiveModel derives from a class of transformers, which need not be installed.
_HOMES = {"ContrastiveCollator": "collator", "ContrastiveModel": "trainer", "ContrastiveOutput": "trainer"}

if not TYPE_CHECKING:  # for a type checker, a name that is not imported above is an error

    def __getattr__(name: str) -> object:
        """Imports a public name when it is first used."""
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return globals().setdefault(name, getattr(import_module(f"{__name__}.{_HOMES[name]}"), name))
