"""Which of the library's similarity functions the losses compute."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from sentence_transformers.util import similarity

# Whether the rows count at norm 1, by the function.
NORMALIZES: dict[Any, bool] = {
    similarity.cos_sim: True,
    similarity.pytorch_cos_sim: True,
    similarity.dot_score: False,
}


def scores_cosines(function: Callable[..., Any]) -> bool:
    """Whether a `similarity_fct` is the cosine, as `cos_sim` is, and not the inner product, as `dot_score`.

    Both are also known as a `functools.partial` that binds nothing, and as the method `similarity` of a model
    whose `similarity_fn_name` is "cosine" or "dot". Any other function is refused with ValueError.
    """
    scored = function
    while isinstance(scored, partial) and not scored.args and not scored.keywords:
        scored = scored.func

    owner: Any = getattr(scored, "__self__", None)
    if getattr(scored, "__name__", "") == "similarity" and hasattr(owner, "similarity_fn_name"):
        scored = similarity.SimilarityFunction.to_similarity_fn(owner.similarity_fn_name)
    normalizes = NORMALIZES.get(scored) if callable(scored) and getattr(scored, "__hash__", None) else None

    if normalizes is None:
        name = getattr(function, "__name__", None) or repr(function)
        raise ValueError(
            "similarity_fct: want cos_sim or dot_score of sentence_transformers.util, whose scores are not "
            f"stored, got {name}; others need their matrix, and with it the library's own loss"
        )
    return normalizes
