"""How much generated sentences look like a text: the share of their word pairs and triples that it has.

No single number says whether something reads as a sentence. These shares are compared with those of real
sentences, of the same words in another order, and of words that are drawn for each position by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, pairwise

import numpy as np

Words = list[str]
BEGIN = ""  # of a sentence; no word is empty


def ngrams(words: Sequence[str], n: int) -> list[tuple[str, ...]]:
    """The runs of n words, the first of which begins before the sentence."""
    padded = [BEGIN, *words]
    return [tuple(padded[i : i + n]) for i in range(len(padded) - n + 1)]


class Phrases:
    """The pairs and triples of neighbouring words of a text.

    Args:
        sentences: the text, as words.
    """

    def __init__(self, sentences: Iterable[Words]) -> None:
        self.known = {gram for words in sentences for n in (2, 3) for gram in ngrams(words, n)}

    def shares(self, sentences: Iterable[Words]) -> dict[str, float]:
        """How sentences compare with the text.

        Returns:
            `pairs` and `triples`: the share of them that the text has. `whole`: the share of sentences of
            which the text has all pairs. `repeats`: that of sentences with a word twice in a row.
        """
        listed = list(sentences)
        have = {n: [[gram in self.known for gram in ngrams(words, n)] for words in listed] for n in (2, 3)}
        return {
            "pairs": float(np.mean(list(chain.from_iterable(have[2])))),
            "triples": float(np.mean(list(chain.from_iterable(have[3])))),
            "whole": float(np.mean([all(of_sentence) for of_sentence in have[2]])),
            "repeats": float(np.mean([any(a == b for a, b in pairwise(words)) for words in listed])),
        }


def in_another_order(sentences: Iterable[Words], seed: int = 0) -> list[Words]:
    """The same sentences with their words in random order; the last one, a full stop, stays."""
    random = np.random.default_rng(seed)
    return [[*(str(word) for word in random.permutation(words[:-1])), words[-1]] for words in sentences]


def by_position(text: Sequence[Words], lengths: Iterable[int], seed: int = 0) -> list[Words]:
    """Sentences of these lengths; each word is that of a random sentence of the same length at its place."""
    random = np.random.default_rng(seed)
    of_length: dict[int, list[Words]] = {}
    for words in text:
        of_length.setdefault(len(words), []).append(words)
    return [
        [of_length[length][random.integers(len(of_length[length]))][place] for place in range(length)]
        for length in lengths
    ]
