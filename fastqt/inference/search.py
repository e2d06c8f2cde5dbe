"""The sentences of a corpus that are nearest to a query, in constant memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional as F

from fastqt.errors import InputError
from fastqt.runs.model import SentenceEncoder
from fastqt.text import read_blocks


class Neighbor(NamedTuple):
    """A sentence found."""

    cosine: float
    sentence: str
    file: str
    line: int  # from 1


def nearest(
    encoder: SentenceEncoder, queries: Sequence[str], corpus: Sequence[str], k: int = 5
) -> list[list[Neighbor]]:
    """The k sentences of a corpus with the highest cosine to each query, best first.

    The corpus is streamed. Of equal cosines the earlier sentence wins; a sentence that occurs twice is
    found twice.

    Args:
        encoder: the model; vectors are [f(s) ; g(s)] with both halves of norm 1.
        queries: sentences.
        corpus: files, see `fastqt.text.read_blocks`.
        k: how many; fewer are returned where the corpus holds fewer.

    Raises:
        InputError: k < 1, a blank query, or a corpus that cannot be read or is empty.
    """
    if k < 1:
        raise InputError(f"k: wanted at least 1, got {k}")
    if not queries or not all(query.strip() for query in queries):
        raise InputError("query: wanted a sentence, got blank text")
    wanted = F.normalize(torch.from_numpy(encoder.encode(list(queries))), dim=1)
    best = torch.empty(len(queries), 0)
    found: list[list[Neighbor]] = [[] for _ in queries]
    for block in read_blocks(corpus):
        vectors = F.normalize(torch.from_numpy(encoder.encode(block.sentences)), dim=1)
        scores = torch.cat([best, wanted @ vectors.T], dim=1)
        best, columns = scores.sort(dim=1, descending=True, stable=True)
        best, columns = best[:, :k], columns[:, :k]
        for row, earlier in enumerate(found):
            found[row] = [
                earlier[column]
                if (index := column - len(earlier)) < 0
                else Neighbor(
                    best[row, rank].item(), block.sentences[index], corpus[block.file], block.lines[index]
                )
                for rank, column in enumerate(columns[row].tolist())
            ]
    if not found[0]:
        raise InputError(f"nothing to search: no sentence in {', '.join(corpus)}")
    return found
