"""Batches of consecutive sentences in corpus order, as tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastqt.errors import InputError
from fastqt.text.reader import Position, read_blocks
from fastqt.text.vocabulary import Encoded, Lexicon


class Batch(NamedTuple):
    """B consecutive sentences of a corpus."""

    tokens: Tensor  # (B, L) int64; padded with 0
    lengths: Tensor  # (B,) int64, 1..L
    document_ids: Tensor  # (B,) int64
    position: Position  # where reading continues after this batch


def batches(
    files: Sequence[str],
    vocabulary: Lexicon,
    batch_size: int,
    *,
    start: Position | None = None,
    smallest: int = 1,
) -> Iterator[Batch]:
    """Streams one pass over a corpus as batches of `batch_size` consecutive sentences.

    The last batch of the pass holds the remaining sentences. It is dropped if it has fewer than `smallest`.

    Args:
        files: as in `read_blocks`.
        vocabulary: encodes the sentences.
        batch_size: B, the number of sentences per batch.
        start: to resume an interrupted pass, the `position` of its last batch.
        smallest: the smallest size that the last batch may have.

    Yields:
        Batches; all but the last have `batch_size` sentences.

    Raises:
        InputError: as in `read_blocks`; also if a whole pass has fewer sentences than a batch.
    """
    parts: list[Encoded] = []
    documents: list[int] = []
    last = start
    for block in read_blocks(files, start):
        encoded = vocabulary.encode(block.sentences)
        ends = np.cumsum(encoded.lengths)
        used = 0
        while len(documents) + len(block.sentences) - used >= batch_size:
            end = used + batch_size - len(documents)
            parts.append(_slice(encoded, ends, used, end))
            last = block.position(end - 1)
            yield _batch(parts, documents + block.documents[used:end], last)
            parts, documents, used = [], [], end
        if used < len(block.sentences):
            parts.append(_slice(encoded, ends, used, len(block.sentences)))
            documents += block.documents[used:]
            rest = block.position(-1)
    if last is None:
        raise InputError(too_short(files, len(documents), batch_size))
    if documents and len(documents) >= smallest:
        yield _batch(parts, documents, rest)


def too_short(files: Sequence[str], sentences: int, batch_size: int) -> str:
    """The error message for a corpus with fewer sentences than a batch."""
    names = ", ".join(files)
    if sentences == 0:
        return f"the corpus is empty: no sentence in {names}"
    return (
        f"the corpus is shorter than a batch: {sentences} sentences in {names}, batch size {batch_size}; "
        "lower the batch size or give more text"
    )


def _slice(encoded: Encoded, ends: NDArray[np.int64], first: int, last: int) -> Encoded:
    """Sentences first to last - 1; `ends` is the cumulative sum of the lengths."""
    begin = ends[first - 1] if first else 0
    return Encoded(encoded.ids[begin : ends[last - 1]], encoded.lengths[first:last])


def _batch(parts: Sequence[Encoded], documents: list[int], position: Position) -> Batch:
    ids = np.concatenate([part.ids for part in parts])
    lengths = np.concatenate([part.lengths for part in parts])
    tokens, sizes = pad(Encoded(ids, lengths))
    return Batch(tokens, sizes, torch.tensor(documents, dtype=torch.int64, device="cpu"), position)


def pad(encoded: Encoded) -> tuple[Tensor, Tensor]:
    """Pads sentences to the length L of the longest.

    Returns:
        tokens: (B, L) int64, padded with 0.
        lengths: (B,) int64.
    """
    lengths = encoded.lengths
    tokens = np.zeros((len(lengths), int(lengths.max())), dtype=np.int64)
    tokens[np.arange(tokens.shape[1]) < lengths[:, None]] = encoded.ids
    return torch.from_numpy(tokens), torch.from_numpy(lengths)
