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
    """The k sentences of a pool with the highest cosine to C + B - A, best first.

    The pool is streamed, as in `fastqt.sentences.inference.search.nearest`. For arrays see
    `fastqt.sentences.evaluation.analogies`.

    Args:
        encoder: the model. Its vectors have norm 1; those of QuickThoughts are [f(s) ; g(s)], with both
            halves at norm 1.
        a: the sentence A.
        b: what A is to.
        c: the sentence C.
        pool: paths of text files, see `fastqt.sentences.text.read_blocks`.
        k: number of sentences.
        exclude: leave sentences out that equal A, B or C. Otherwise these may be found.

    Returns:
        The sentences; fewer than k if the pool holds fewer.

    Raises:
        InputError: k < 1, a sentence is blank or not UTF-8, C + B - A is 0, or the pool cannot be read, is
            empty or holds the excluded sentences alone.
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
