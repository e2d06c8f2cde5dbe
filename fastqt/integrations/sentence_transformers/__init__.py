"""fastqt's losses in the trainer of the `sentence_transformers` library (the extra `st`).

The classes that take the place of the library's own of the same name are subclasses of these, and are
imported when they are first used, so that this module can be imported without the library.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from fastqt.integrations._libraries import load_library
from fastqt.integrations.sentence_transformers.columns import CachedLoss, SentenceTransformerLoss
from fastqt.integrations.sentence_transformers.patching import Patch, patch

if TYPE_CHECKING:
    from fastqt.integrations.sentence_transformers.cosent import AnglELoss, CoSENTLoss
    from fastqt.integrations.sentence_transformers.gist import CachedGISTEmbedLoss, GISTEmbedLoss
    from fastqt.integrations.sentence_transformers.matryoshka import MatryoshkaLoss
    from fastqt.integrations.sentence_transformers.multi_vector import (
        CachedMultiVectorMultipleNegativesRankingLoss,
        MultiVectorMultipleNegativesRankingLoss,
    )
    from fastqt.integrations.sentence_transformers.ranking import (
        CachedMultipleNegativesRankingLoss,
        CachedMultipleNegativesSymmetricRankingLoss,
        MultipleNegativesRankingLoss,
        MultipleNegativesSymmetricRankingLoss,
    )
    from fastqt.integrations.sentence_transformers.splade import pool_without_logits
    from fastqt.integrations.sentence_transformers.spread_out import GlobalOrthogonalRegularizationLoss
    from fastqt.integrations.sentence_transformers.static_embedding import StaticEmbedding
    from fastqt.integrations.sentence_transformers.static_training import accelerate_static
    from fastqt.integrations.sentence_transformers.triplets import (
        BatchAllTripletLoss,
        BatchHardSoftMarginTripletLoss,
        BatchHardTripletLoss,
        BatchSemiHardTripletLoss,
    )

# The library's classes that have a replacement of the same name here, and the module that holds it.
REPLACEMENTS = {
    "MultipleNegativesRankingLoss": "ranking",
    "CachedMultipleNegativesRankingLoss": "ranking",
    "MultipleNegativesSymmetricRankingLoss": "ranking",
    "CachedMultipleNegativesSymmetricRankingLoss": "ranking",
    "GISTEmbedLoss": "gist",
    "CachedGISTEmbedLoss": "gist",
    "CoSENTLoss": "cosent",
    "AnglELoss": "cosent",
    "BatchAllTripletLoss": "triplets",
    "BatchHardSoftMarginTripletLoss": "triplets",
    "BatchHardTripletLoss": "triplets",
    "BatchSemiHardTripletLoss": "triplets",
    "MatryoshkaLoss": "matryoshka",
    "GlobalOrthogonalRegularizationLoss": "spread_out",
    "MultiVectorMultipleNegativesRankingLoss": "multi_vector",
    "CachedMultiVectorMultipleNegativesRankingLoss": "multi_vector",
}

# What else is in a module that imports the library.
_OTHERS = {
    "StaticEmbedding": "static_embedding",
    "accelerate_static": "static_training",
    "pool_without_logits": "splade",
}

__all__ = [
    "REPLACEMENTS",
    "AnglELoss",
    "BatchAllTripletLoss",
    "BatchHardSoftMarginTripletLoss",
    "BatchHardTripletLoss",
    "BatchSemiHardTripletLoss",
    "CachedGISTEmbedLoss",
    "CachedLoss",
    "CachedMultiVectorMultipleNegativesRankingLoss",
    "CachedMultipleNegativesRankingLoss",
    "CachedMultipleNegativesSymmetricRankingLoss",
    "CoSENTLoss",
    "GISTEmbedLoss",
    "GlobalOrthogonalRegularizationLoss",
    "MatryoshkaLoss",
    "MultiVectorMultipleNegativesRankingLoss",
    "MultipleNegativesRankingLoss",
    "MultipleNegativesSymmetricRankingLoss",
    "Patch",
    "SentenceTransformerLoss",
    "StaticEmbedding",
    "accelerate_static",
    "patch",
    "pool_without_logits",
]

if not TYPE_CHECKING:  # for a type checker, a name that is not imported above is an error

    def __getattr__(name: str) -> object:
        """Imports what wants the library; Python calls this for names that the module does not hold yet."""
        homes = REPLACEMENTS | _OTHERS
        if name not in homes:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        load_library("sentence_transformers")
        return getattr(import_module(f"{__name__}.{homes[name]}"), name)
