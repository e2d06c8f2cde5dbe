"""A whole corpus as word numbers in memory, for trainings that take its sentences in random order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastqt.text.batches import pad
from fastqt.text.reader import read_blocks
from fastqt.text.vocabulary import Encoded, Lexicon


class Sample(NamedTuple):
    """Sentences from anywhere in a corpus."""

    tokens: Tensor  # (B, L) int64; beyond a sentence's length, 0
    lengths: Tensor  # (B,) int64, 1..L
    rows: Tensor  # (B,) int64, the sentences' numbers in the corpus


class Corpus:
    """The sentences of text files, four bytes a word.

    Args:
        files: see `fastqt.text.read_blocks`.
        vocabulary: how to encode.

    Raises:
        InputError: as `read_blocks`.
    """

    def __init__(self, files: Sequence[str], vocabulary: Lexicon) -> None:
        parts = [vocabulary.encode(block.sentences) for block in read_blocks(files)]
        self._ids = np.concatenate([np.zeros(0, np.int32), *(part.ids.astype(np.int32) for part in parts)])
        self._lengths = np.concatenate([np.zeros(0, np.int64), *(part.lengths for part in parts)])
        self._starts = np.cumsum(self._lengths) - self._lengths

    def __len__(self) -> int:
        return len(self._lengths)

    def sample(self, rows: NDArray[np.int64]) -> Sample:
        """The sentences of these numbers, in this order."""
        lengths = self._lengths[rows]
        words = [self._ids[start : start + n] for start, n in zip(self._starts[rows], lengths, strict=True)]
        tokens, sizes = pad(Encoded(np.concatenate(words).astype(np.int64), lengths))
        return Sample(tokens, sizes, torch.from_numpy(rows))

    def shuffled(
        self, batch_size: int, *, seed: int, epoch: int, first: int = 0, smallest: int = 1
    ) -> Iterator[Sample]:
        """One pass over all sentences in an order of its own, from batch number `first` on.

        Args:
            batch_size: sentences a batch; the last batch holds what is left, or is dropped where that is
                fewer than `smallest`.
            seed, epoch: what the order depends on.
        """
        order = np.random.default_rng([seed, epoch]).permutation(len(self))
        for begin in range(first * batch_size, len(self), batch_size):
            rows = order[begin : begin + batch_size]
            if len(rows) >= smallest:
                yield self.sample(rows)
