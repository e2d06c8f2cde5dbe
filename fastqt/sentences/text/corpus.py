"""A corpus of token ids in memory, of sentences or of rows of texts, for training in random order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastqt.errors import InputError
from fastqt.nn.tokens import Encoded, pad
from fastqt.sentences.text.reader import numbered_lines, read_blocks
from fastqt.sentences.text.tables import Columns
from fastqt.sentences.text.vocabulary import Lexicon

ROWS_TOGETHER = 4096  # rows that are read, and encoded, at a time


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


class Prompts(NamedTuple):
    """What texts begin with when a model encodes them, so that it tells queries from documents."""

    query: str = ""
    document: str = ""

    def of_rows(self, rows: Sequence[Sequence[str]]) -> list[list[str]]:
        """Rows with the prompts in front: the first text of a row is a query, the others are documents."""
        return [[self.query + query, *map(self.document.__add__, texts)] for query, *texts in rows]


def read_triplets(files: Sequence[str], width: int | None = None) -> Iterator[list[list[str]]]:
    """Streams the rows of files in which tabs separate an anchor, its positive and any hard negatives.

    The files are as in `fastqt.sentences.text.read_blocks`. All rows have as many columns, by default as the
    first one, at least 2, and text in each. White space around a text is removed. Lines that are blank are no
    rows.
    """
    rows: list[list[str]] = []
    first = f"{width} columns"

    for path in files:
        for number, line in numbered_lines(path):
            if not line.strip():
                continue

            row = [text.strip() for text in line.split("\t")]
            if len(row) < 2:
                raise InputError(
                    f"{path}: line {number}: want an anchor, a positive and any hard negatives with a "
                    "tab between them, got 1 column"
                )

            if width is None:
                width, first = len(row), f"{len(row)} columns as in line {number} of {path}"
            if len(row) != width:
                raise InputError(f"{path}: line {number}: want {first}, got {len(row)}")
            if not all(row):
                raise InputError(
                    f"{path}: line {number}: want text in each column, got none in column {row.index('') + 1}"
                )

            rows.append(row)
            if len(rows) == ROWS_TOGETHER:
                yield rows
                rows = []

    if rows:
        yield rows


class TripletCorpus(Corpus):
    """The encoded rows of files as `read_triplets` reads them; it takes four bytes of memory per word.

    `width` is the number of columns; the texts are encoded with `prompts` in front. Files without a row are
    refused.
    """

    def __init__(
        self,
        files: Sequence[str],
        vocabulary: Lexicon,
        *,
        width: int | None = None,
        prompts: Prompts | None = None,
    ) -> None:
        parts, prompts = [], prompts or Prompts()
        for rows in read_triplets(files, width):
            width = len(rows[0])
            parts.append(vocabulary.encode([text for row in prompts.of_rows(rows) for text in row]))
        if width is None or not parts:
            raise InputError(f"the corpus is empty: no row in {', '.join(files)}")
        self.width = width
        self._keep(parts)

    def __len__(self) -> int:
        return super().__len__() // self.width

    def sample(self, rows: NDArray[np.int64]) -> Sample:
        """The rows with the indices `rows`, (B,) int64, in this order.

        Of C columns these are tokens (C B, L) and lengths (C B,): all anchors, then all positives, and so on.
        """
        texts = (rows * self.width + np.arange(self.width)[:, None]).reshape(-1)
        return super().sample(texts)._replace(rows=torch.from_numpy(rows))
