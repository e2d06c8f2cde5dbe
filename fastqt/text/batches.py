"""Batches of consecutive sentences, in corpus order, as tensors."""

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
    """Consecutive sentences."""

    tokens: Tensor  # (B, L) int64; beyond a sentence's length, 0
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

    The last batch of the pass holds what is left; it is dropped where that is fewer than `smallest`.

    Args:
        files: see `read_blocks`.
        vocabulary: how to encode.
        batch_size: sentences a batch, B.
        start: where to begin: the `position` of the last batch of a pass that was broken off.
        smallest: fewest sentences that the last batch may have.

    Raises:
        InputError: as `read_blocks`; and where a whole pass holds fewer sentences than a batch.
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
    """The message for a corpus with fewer sentences than a batch."""
    names = ", ".join(files)
    if sentences == 0:
        return f"the corpus is empty: no sentence in {names}"
    return (
        f"the corpus is shorter than a batch: {sentences} sentences in {names}, batch size {batch_size}; "
        "lower the batch size or give more text"
    )


def _slice(encoded: Encoded, ends: NDArray[np.int64], first: int, last: int) -> Encoded:
    """Sentences first..last-1; `ends` is the running sum of the lengths."""
    begin = ends[first - 1] if first else 0
    return Encoded(encoded.ids[begin : ends[last - 1]], encoded.lengths[first:last])


def _batch(parts: Sequence[Encoded], documents: list[int], position: Position) -> Batch:
    ids = np.concatenate([part.ids for part in parts])
    lengths = np.concatenate([part.lengths for part in parts])
    tokens, sizes = pad(Encoded(ids, lengths))
    return Batch(tokens, sizes, torch.tensor(documents, dtype=torch.int64), position)


def pad(encoded: Encoded) -> tuple[Tensor, Tensor]:
    """Stacks sentences into tokens (B, L) and lengths (B,), int64, L the longest; 0 fills the rest."""
    lengths = encoded.lengths
    tokens = np.zeros((len(lengths), int(lengths.max())), dtype=np.int64)
    tokens[np.arange(tokens.shape[1]) < lengths[:, None]] = encoded.ids
    return torch.from_numpy(tokens), torch.from_numpy(lengths)
