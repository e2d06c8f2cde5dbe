"""Searches a corpus for the sentences that are nearest to a query."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional as F

from fastqt.errors import InputError
from fastqt.inference.checks import check_sentence
from fastqt.runs.model import SentenceEncoder
from fastqt.text import read_blocks


class Neighbor(NamedTuple):
    """A sentence of the corpus."""

    cosine: float  # to the query
    sentence: str
    file: str
    line: int  # counted from 1


def nearest(
    encoder: SentenceEncoder, queries: Sequence[str], corpus: Sequence[str], k: int = 5
) -> list[list[Neighbor]]:
    """The k sentences of a corpus with the highest cosine to each query, best first.

    The corpus is streamed, so memory does not grow with it. Among equal cosines, the earlier sentence comes
    first. A sentence that occurs twice is found twice.

    Args:
        encoder: the model. The vectors of QuickThoughts are [f(s) ; g(s)], with both halves at norm 1.
        queries: sentences.
        corpus: paths of text files, see `fastqt.text.read_blocks`.
        k: number of sentences for each query.

    Returns:
        One list for each query; shorter than k if the corpus holds fewer sentences.

    Raises:
        InputError: k < 1, a query is blank or not UTF-8, or the corpus cannot be read or is empty.
    """
    if k < 1:
        raise InputError(f"k: want at least 1, got {k}")
    if not queries:
        raise InputError("query: want at least one sentence, got none")
    for query in queries:
        check_sentence("query", query)
    query_vectors = F.normalize(torch.from_numpy(encoder.encode(list(queries))), dim=1)
    best = torch.empty(len(queries), 0)
    found: list[list[Neighbor]] = [[] for _ in queries]
    for block in read_blocks(corpus):
        vectors = F.normalize(torch.from_numpy(encoder.encode(block.sentences)), dim=1)
        scores = torch.cat([best, query_vectors @ vectors.T], dim=1)
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
