"""Evaluation of sentence vectors by the protocols of the literature; see docs/evaluation.md."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastqt.sentences.evaluation.baselines import SIF, WordVectors, random_encoder, remove_component
    from fastqt.sentences.evaluation.classification import (
        cross_validated,
        held_out_validated,
        limited_data,
        nested_cross_validation,
        pair_features,
    )
    from fastqt.sentences.evaluation.encoders import load_encoder
    from fastqt.sentences.evaluation.pools import analogies, nearest_rows
    from fastqt.sentences.evaluation.ranking import ranking_metrics
    from fastqt.sentences.evaluation.retrieval import LinearMaps, fit_maps
    from fastqt.sentences.evaluation.shots import few_shot
    from fastqt.sentences.evaluation.similarity import (
        alignment,
        correlate,
        correlate_subsets,
        cosines,
        floor_split,
        relatedness,
        uniformity,
    )
    from fastqt.sentences.evaluation.suite import Results, evaluate
    from fastqt.sentences.evaluation.vectors import Cache
    from fastqt.sentences.inference.search import nearest
    from fastqt.sentences.options.evaluation import PAPER_GRID, SENTEVAL_GRID

__all__ = [
    "PAPER_GRID",
    "SENTEVAL_GRID",
    "SIF",
    "Cache",
    "LinearMaps",
    "Results",
    "WordVectors",
    "alignment",
    "analogies",
    "correlate",
    "correlate_subsets",
    "cosines",
    "cross_validated",
    "evaluate",
    "few_shot",
    "fit_maps",
    "floor_split",
    "held_out_validated",
    "limited_data",
    "load_encoder",
    "nearest",
    "nearest_rows",
    "nested_cross_validation",
    "pair_features",
    "random_encoder",
    "ranking_metrics",
    "relatedness",
    "remove_component",
    "uniformity",
]


# Where the names are found when they are first used. The first five modules need neither SciPy nor
# scikit-learn, so that vectors are searched, and a search is judged, without the extra `eval`.
_HOMES = (
    "evaluation.pools",
    "evaluation.ranking",
    "evaluation.vectors",
    "inference.search",
    "options.evaluation",
    "evaluation.baselines",
    "evaluation.classification",
    "evaluation.encoders",
    "evaluation.retrieval",
    "evaluation.shots",
    "evaluation.similarity",
    "evaluation.suite",
)

if not TYPE_CHECKING:  # for a type checker, a name that is not imported above is an error

    def __getattr__(name: str) -> object:
        """Imports a public name; Python calls this for names that the module does not hold yet."""
        for place in _HOMES if name in __all__ else ():
            try:
                home = import_module(f"fastqt.sentences.{place}")
            except ModuleNotFoundError as error:
                wanted = f"want {error.name}, got none: pip install 'fastqt[eval]'"
                raise ImportError(wanted, name=error.name) from error
            if hasattr(home, name):
                return globals().setdefault(name, getattr(home, name))
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
