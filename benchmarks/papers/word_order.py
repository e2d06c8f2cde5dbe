"""How much of the order of words a sum of a sentence's and a position's scores can tell, whatever d is.

GLOSS by position scores word w at position l of sentence i by s(i, w) + m(w, l). Here both tables are free,
as if the latent vectors had any width, and a sentence has only its own words to choose from.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from benchmarks.papers.phrases import Words

STEPS, RATE = 200, 0.1  # of Adam, on a convex loss


def order_limit(sentences: Sequence[Words], steps: int = STEPS) -> float:
    """The share of words that are right if both tables are fitted to put each sentence's words in order.

    Args:
        sentences: as words; the cross-entropy is over a sentence's own distinct words at each position.
        steps: of Adam.

    Returns:
        In 0..1. What is missing from 1 no decoder of this form reproduces, except that the cross-entropy and
        not the share itself is fitted.
    """
    ids = {word: number for number, word in enumerate(sorted({w for words in sentences for w in words}))}
    L = max(len(words) for words in sentences)

    numbers = np.zeros((len(sentences), L), dtype=np.int64)  # the distinct words of each sentence
    known = np.zeros((len(sentences), L), dtype=bool)
    wanted = np.full((len(sentences), L), -100)  # the place of the right word among them

    for row, words in enumerate(sentences):
        distinct = {word: place for place, word in enumerate(dict.fromkeys(words))}
        numbers[row, : len(distinct)] = [ids[word] for word in distinct]
        known[row, : len(distinct)] = True
        wanted[row, : len(words)] = [distinct[word] for word in words]

    words, ruled_out, right = torch.from_numpy(numbers), torch.from_numpy(~known), torch.from_numpy(wanted)

    of_sentence = torch.zeros(len(sentences), 1, L, requires_grad=True)
    of_position = torch.zeros(len(ids), L, requires_grad=True)
    optimizer = torch.optim.Adam([of_sentence, of_position], lr=RATE)
    scores = torch.empty(0)

    for _ in range(steps):
        scores = of_sentence + of_position[words].transpose(1, 2)  # (sentence, position, own word)
        scores = scores.masked_fill(ruled_out[:, None], -torch.inf)

        loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), right.flatten(), reduction="sum")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    inside = right >= 0
    return float((scores.argmax(dim=2) == right)[inside].double().mean())
