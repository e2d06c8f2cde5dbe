"""Searches a corpus for the sentences that are nearest to a query."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fastqt.errors import InputError
from fastqt.inference.best import Best
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
    query_vectors = encode_queries(encoder, queries, k)
    best, places, first = Best(len(queries), k), dict[int, tuple[str, str, int]](), 0
    for block in read_blocks(corpus):
        vectors = normalized(encoder, block.sentences)
        best.add(query_vectors @ vectors.T, first)
        places = {
            row: places[row]
            if (index := row - first) < 0
            else (block.sentences[index], corpus[block.file], block.lines[index])
            for row in best.rows.unique().tolist()
        }
        first += len(vectors)
    if not places:
        raise InputError(f"nothing to search: no sentence in {', '.join(corpus)}")
    return [
        [Neighbor(score, *places[row]) for score, row in zip(scores, rows, strict=True)]
        for scores, rows in zip(best.scores.tolist(), best.rows.tolist(), strict=True)
    ]


def encode_queries(encoder: SentenceEncoder, queries: Sequence[str], k: int) -> Tensor:
    """The vectors of queries, (Q, D) at norm 1.

    Raises:
        InputError: k < 1, there is no query, or one is blank or not UTF-8.
    """
    if k < 1:
        raise InputError(f"k: want at least 1, got {k}")
    if not queries:
        raise InputError("query: want at least one sentence, got none")
    for query in queries:
        check_sentence("query", query)
    return normalized(encoder, list(queries))


def normalized(encoder: SentenceEncoder, sentences: list[str]) -> Tensor:
    """The vectors of sentences, (n, D) float32 at norm 1: the product of two of them is their cosine."""
    return F.normalize(torch.from_numpy(encoder.encode(sentences)), dim=1)
