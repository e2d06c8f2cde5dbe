"""Checks that what was written gives the vectors of `fastqt embed`, before it is put in its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from fastqt.errors import InputError
from fastqt.sentences.inference.encoder import SentenceEncoder
from fastqt.sentences.text import Vocabulary

TOLERANCE = 1e-5  # of a vector's elements, at norm 1: several roundings of float32 in another order of sums
WORDS = 40  # of the vocabulary that the texts are made of


def probes(encoder: SentenceEncoder) -> list[str]:
    """Texts of several lengths: words of the vocabulary, unknown ones, and more than the model keeps."""
    vocabulary = cast("Vocabulary", encoder.vocabulary)
    special = set(vocabulary.special_ids())
    known = sorted(word for word, number in vocabulary.tokenizer.get_vocab().items() if number not in special)
    words = known[:: max(1, len(known) // WORDS)]
    length = vocabulary.max_length + 3
    too_long = " ".join((words * length)[:length])
    return [words[-1], " ".join(words[:5]), "œuvre qwxyz", f"{words[0]} qwxyz {words[-1]} .", too_long]


def check_vectors(
    encoder: SentenceEncoder,
    encode: Callable[[Sequence[str]], NDArray[Any]],
    *,
    normalize: bool,
    format: str,
) -> None:
    """Compares the vectors of an export with those of the run: of all probes together, and of one alone."""
    texts = probes(encoder)
    wanted = encoder.encode(texts, normalize=normalize)
    vectors = np.concatenate([encode(texts), encode(texts[1:2])])
    expected = np.concatenate([wanted, wanted[1:2]])

    if vectors.shape != expected.shape:
        raise InputError(f"format: {format} gives vectors of shape {vectors.shape}, want {expected.shape}")
    largest = max(1.0, float(np.abs(expected).max()))
    error = float(np.abs(vectors - expected).max())
    if not error <= TOLERANCE * largest:
        raise InputError(
            f"format: the vectors in {format} differ from those of this model by {error:.1e}, want at most "
            f"{TOLERANCE * largest:.0e}: the libraries compute this encoder differently"
        )
