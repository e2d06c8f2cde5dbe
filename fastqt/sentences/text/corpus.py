"""A corpus of token ids in memory, for training on its sentences in random order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastqt.nn.tokens import Encoded, pad
from fastqt.sentences.text.reader import read_blocks
from fastqt.sentences.text.tables import Columns
from fastqt.sentences.text.vocabulary import Lexicon


class Sample(NamedTuple):
    """B sentences from any places of a corpus."""

    tokens: Tensor  # (B, L) int64; padded with 0
    lengths: Tensor  # (B,) int64, 1..L
    rows: Tensor  # (B,) int64, the indices of the sentences in the corpus


class Corpus:
    """The encoded sentences of text files and tables; it takes four bytes of memory per word.

    Files and columns are as in `fastqt.sentences.text.read_blocks`.
    """

    def __init__(self, files: Sequence[str], vocabulary: Lexicon, *, columns: Columns | None = None) -> None:
        self._keep([vocabulary.encode(block.sentences) for block in read_blocks(files, columns=columns)])

    def _keep(self, parts: Sequence[Encoded]) -> None:
        """Takes the sentences of all parts, one part after the other."""
        self._ids = np.concatenate([np.zeros(0, np.int32), *(part.ids.astype(np.int32) for part in parts)])
        self._lengths = np.concatenate([np.zeros(0, np.int64), *(part.lengths for part in parts)])
        self._starts = np.cumsum(self._lengths) - self._lengths

    def __len__(self) -> int:
        return len(self._lengths)

    def sample(self, rows: NDArray[np.int64]) -> Sample:
        """The sentences with the indices `rows`, (B,) int64, in this order."""
        lengths = self._lengths[rows]
        words = [self._ids[start : start + n] for start, n in zip(self._starts[rows], lengths, strict=True)]
        tokens, sizes = pad(Encoded(np.concatenate(words).astype(np.int64), lengths))
        return Sample(tokens, sizes, torch.from_numpy(rows))

    def order(self, seed: int, epoch: int) -> NDArray[np.int64]:
        """The indices of all sentences, (n,) int64, in the random order of one pass."""
        return np.random.default_rng([seed, epoch]).permutation(len(self))
