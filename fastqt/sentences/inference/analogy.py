"""Sentence analogies: A is to B as C is to a sentence of a pool."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from fastqt.errors import InputError
from fastqt.sentences.inference.checks import check_sentence
from fastqt.sentences.inference.encoder import SentenceEncoder
from fastqt.sentences.inference.search import Neighbor, nearest_to


def answers(
    encoder: SentenceEncoder,
    a: str,
    b: str,
    c: str,
    pool: Sequence[str],
    k: int = 5,
    *,
    exclude: bool = False,
) -> list[Neighbor]:
    """The k sentences of a pool with the highest cosine to C + B - A, best first, or all if it has fewer.

    The pool is paths of text files, which are streamed, as in `fastqt.sentences.inference.search.nearest`.
    For arrays see `fastqt.sentences.evaluation.analogies`. Vectors have norm 1; those of QuickThoughts are
    [f(s) ; g(s)], with both halves at norm 1. `exclude` leaves sentences out that equal A, B or C.
    """
    texts = {"a": a, "b": b, "c": c}
    for name, text in texts.items():
        check_sentence(name, text)
    vectors = torch.from_numpy(encoder.encode(list(texts.values())))
    target = vectors[2] + vectors[1] - vectors[0]
    if not target.any():
        raise InputError("c: want a sentence for which C + B - A has a direction, got a sum of zeros")
    excluded = frozenset(text.strip() for text in texts.values()) if exclude else frozenset()
    (neighbors,) = nearest_to(encoder, F.normalize(target[None], dim=1), pool, k, excluded=excluded)
    return neighbors
