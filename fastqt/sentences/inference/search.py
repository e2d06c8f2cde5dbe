"""Exact search: the best of a stream of scores, and the sentences of a corpus that are nearest."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from fastqt.errors import InputError
from fastqt.nn.tokens import list_of_texts
from fastqt.sentences.inference.encoder import TextEncoder
from fastqt.sentences.options.commands import Side
from fastqt.sentences.text import read_blocks

ROWS = 8192  # that queries are compared with at a time

Hits = tuple[NDArray[np.float32], NDArray[np.int64]]  # cosines and rows, (Q, k)


def highest(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k highest scores of each row (Q, n) and their columns, (Q, min(k, n)), best first.

    Among equal scores, the first columns come first.
    """
    if k < scores.shape[1]:
        best, columns = scores.topk(k, dim=1)
        # topk takes any of several equal scores. That is no matter where none of them is left over.
        if bool(((scores >= best[:, -1:]).sum(dim=1) == k).all()):
            columns = columns.sort(dim=1).values
            best, order = scores.gather(1, columns).sort(dim=1, descending=True, stable=True)
            return best, columns.gather(1, order)
    best, columns = scores.sort(dim=1, descending=True, stable=True)
    return best[:, :k], columns[:, :k]


class Best:
    """The k highest scores of each of Q queries among those that were added so far.

    `scores`, (Q, m), are best first, with m = k as soon as there are so many, and `rows`, (Q, m) int64, say
    where they are. Among equal scores, earlier rows come first.
    """

    def __init__(self, queries: int, k: int) -> None:
        self.k = k
        self.scores = torch.empty(queries, 0, device="cpu")
        self.rows = torch.empty(queries, 0, dtype=torch.int64, device="cpu")

    def add(self, scores: Tensor, first: int) -> None:
        """Adds the scores (Q, n) of rows first, first + 1, ..., which come after all rows before."""
        rows = torch.arange(first, first + scores.shape[1], device="cpu").expand_as(scores)
        self.scores, columns = highest(torch.cat([self.scores, scores], dim=1), self.k)
        self.rows = torch.cat([self.rows, rows], dim=1).gather(1, columns)

    def results(self) -> Hits:
        """Scores and rows, (Q, m) each."""
        return self.scores.numpy(), self.rows.numpy()


def best_products(queries: Tensor, parts: Iterable[Tensor], k: int) -> Best:
    """The k highest inner products of queries (Q, D) with the rows of parts (n, D), which follow each other.

    They are cosines where all vectors have norm 1.
    """
    best, first = Best(len(queries), k), 0
    for part in parts:
        best.add(queries @ part.T, first)
        first += len(part)
    return best


def unit_rows(vectors: NDArray[Any]) -> Tensor:
    """Vectors (n, D) as float32 at norm 1."""
    return F.normalize(torch.from_numpy(np.array(vectors, dtype=np.float32)), dim=1)


def blocks(rows: int, size: int | None = None) -> Iterable[slice]:
    """The rows 0 … rows − 1 in parts of `size`, or of ROWS."""
    size = size or ROWS
    return (slice(begin, begin + size) for begin in range(0, rows, size))


class Flat:
    """Finds the rows of vectors (n, D) with the highest cosines to queries, which are (Q, D) at norm 1."""

    most_effort = 1

    def __init__(self, vectors: NDArray[np.float32]) -> None:
        self.vectors = vectors

    def search(self, queries: NDArray[np.float32], k: int, effort: int) -> Hits:
        # The parts are copied: in a file the vectors are not aligned.
        parts = (torch.from_numpy(np.array(self.vectors[part])) for part in blocks(len(self.vectors)))
        return best_products(torch.from_numpy(queries), parts, k).results()


class Neighbor(NamedTuple):
    """A sentence of the corpus."""

    cosine: float  # to the query
    sentence: str
    file: str
    line: int  # counted from 1

    def __str__(self) -> str:
        return f"{self.cosine:.3f}  {self.sentence}  ({self.file}:{self.line})"


def nearest(
    encoder: TextEncoder, queries: Sequence[str], corpus: Sequence[str], k: int = 5
) -> list[list[Neighbor]]:
    """The k sentences of a corpus with the highest cosine to each query, best first.

    The corpus is streamed, so memory does not grow with it. Among equal cosines, the earlier sentence comes
    first. A sentence that occurs twice is found twice.

    Args:
        encoder: the model. The vectors of QuickThoughts are [f(s) ; g(s)], with both halves at norm 1.
        queries: sentences.
        corpus: paths of text files, see `fastqt.sentences.text.read_blocks`.
        k: number of sentences for each query.

    Returns:
        One list for each query; shorter than k if the corpus holds fewer sentences.

    Raises:
        InputError: k < 1, a query is blank or not UTF-8, or the corpus cannot be read or is empty.
        TypeError: one query in place of a list.

    Example:
        >>> from fastqt.sentences.evaluation import nearest
        >>> from fastqt.sentences.inference.encoder import SentenceEncoder
        >>> encoder = SentenceEncoder.load("run")  # a directory that `fastqt train` wrote
        >>> (found,) = nearest(encoder, ["She closed the door."], ["novels.txt"], k=2)
        >>> [neighbour.line for neighbour in found][:1], found[0].cosine >= found[1].cosine
        ([1], True)
    """
    return nearest_to(encoder, encode_queries(encoder, queries, k), corpus, k)


def nearest_to(
    encoder: TextEncoder,
    vectors: Tensor,  # (Q, D)
    corpus: Sequence[str],
    k: int = 5,
    *,
    excluded: Collection[str] = (),
) -> list[list[Neighbor]]:
    """The k sentences of a corpus with the highest cosine to each of the vectors, best first, as `nearest`.

    Vectors are float32 at norm 1. Sentences that are excluded are passed over; a list is shorter than k if
    the corpus holds fewer.
    """
    check_k(k)
    best, places, first = Best(len(vectors), k), dict[int, tuple[str, str, int]](), 0
    for block in read_blocks(corpus):
        sentences = [
            (sentence, corpus[block.file], line)
            for sentence, line in zip(block.sentences, block.lines, strict=True)
            if sentence not in excluded
        ]
        if not sentences:
            continue
        texts = [sentence for sentence, _, _ in sentences]
        best.add(vectors @ normalized(encoder, texts, "document").T, first)
        places = {
            row: places[row] if row < first else sentences[row - first] for row in best.rows.unique().tolist()
        }
        first += len(sentences)

    if not places:
        raise InputError(
            f"nothing to search: no {'other ' if excluded else ''}sentence in {', '.join(corpus)}"
        )

    return [
        [Neighbor(score, *places[row]) for score, row in zip(scores, rows, strict=True)]
        for scores, rows in zip(best.scores.tolist(), best.rows.tolist(), strict=True)
    ]


def check_k(k: int) -> None:
    """Raises InputError if a search is to find less than one sentence."""
    if k < 1:
        raise InputError(f"k: want at least 1, got {k}")


def encode_queries(encoder: TextEncoder, queries: Sequence[str], k: int) -> Tensor:
    """The vectors of queries, (Q, D) at norm 1; k and the queries are checked."""
    check_k(k)
    queries = list_of_texts("query", queries)
    if not queries:
        raise InputError("query: want at least one sentence, got none")
    for query in queries:
        check_sentence("query", query)
    return normalized(encoder, queries, "query")


def normalized(encoder: TextEncoder, sentences: list[str], side: Side) -> Tensor:
    """The vectors of sentences, (n, D) float32 at norm 1: the product of two of them is their cosine."""
    return F.normalize(torch.from_numpy(encoder.encode(sentences, side=side)), dim=1)


def check_sentence(name: str, text: str) -> None:
    """Refuses a text that no model can encode: one that is blank or, on a command line, was not UTF-8."""
    if not text.strip():
        raise InputError(f"{name}: want a sentence, got blank text")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(f"{name}: want text in UTF-8, got {text!r}") from None


def answers(
    encoder: TextEncoder,
    a: str,
    b: str,
    c: str,
    pool: Sequence[str],
    k: int = 5,
    *,
    exclude: bool = False,
) -> list[Neighbor]:
    """The k sentences of a pool with the highest cosine to C + B - A, best first, or all if it has fewer.

    The pool is paths of text files, which are streamed, as in `nearest`. Vectors have norm 1; those of
    QuickThoughts are [f(s) ; g(s)], with both halves at norm 1. `exclude` leaves sentences out that equal A,
    B or C.
    """
    texts = {"a": a, "b": b, "c": c}
    for name, text in texts.items():
        check_sentence(name, text)
    vectors = torch.from_numpy(encoder.encode(list(texts.values())))
    target = vectors[2] + vectors[1] - vectors[0]
    if not target.any():
        raise InputError("c: want a sentence for which C + B - A has a direction, got a sum of zeros")
    excluded = frozenset(text.strip() for text in texts.values()) if exclude else frozenset()
    (neighbors,) = nearest_to(encoder, F.normalize(target[None], dim=1), pool, k, excluded=excluded)
    return neighbors
