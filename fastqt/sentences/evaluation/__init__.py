"""Evaluation of sentence vectors by the protocols of the literature; see docs/evaluation.md."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastqt.sentences.evaluation.classification import few_shot, limited_data
    from fastqt.sentences.evaluation.encoders import load_encoder
    from fastqt.sentences.evaluation.ranking import ranking_metrics
    from fastqt.sentences.evaluation.similarity import alignment, uniformity
    from fastqt.sentences.evaluation.suite import evaluate
    from fastqt.sentences.inference.search import nearest
    from fastqt.sentences.options.commands import PAPER_GRID, SENTEVAL_GRID

__all__ = [
    "PAPER_GRID",
    "SENTEVAL_GRID",
    "alignment",
    "evaluate",
    "few_shot",
    "limited_data",
    "load_encoder",
    "nearest",
    "ranking_metrics",
    "uniformity",
]

# Where the names are found when they are first used. The first three modules need neither SciPy nor
# scikit-learn, so that a corpus is searched, and a search is judged, without the extra `eval`.
_HOMES = (
    "evaluation.ranking",
    "inference.search",
    "options.commands",
    "evaluation.classification",
    "evaluation.encoders",
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
