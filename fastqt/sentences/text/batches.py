"""Batches of sentences or of rows of texts, as tensors: streamed in corpus order, or drawn from memory."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastqt.errors import InputError
from fastqt.nn.tokens import Encoded, pad
from fastqt.sentences.text.ahead import EncodedAhead
from fastqt.sentences.text.duplicates import fingerprints
from fastqt.sentences.text.reader import Block, Position, read_blocks
from fastqt.sentences.text.rows import read_triplets
from fastqt.sentences.text.vocabulary import Lexicon

MOST_WAITING = 1 << 27  # characters of texts that are held in memory until they are encoded


class Batch(NamedTuple):
    """B consecutive sentences of a corpus."""

    tokens: Tensor  # (B, L) int64; padded with 0
    lengths: Tensor  # (B,) int64, 1..L
    document_ids: Tensor  # (B,) int64
    pieces: Tensor | None = None  # (B,) int64, the span of each sentence, if the batch has several


class Span(NamedTuple):
    """Consecutive sentences of a corpus."""

    start: Position  # where reading begins
    sentences: int  # how many


def batches(
    files: Sequence[str],
    vocabulary: Lexicon,
    batch_size: int,
    *,
    most: int = sys.maxsize,
    column: str | None = None,
) -> Iterator[Batch]:
    """Streams the first `most` batches of a corpus, each of `batch_size` consecutive sentences.

    What remains is dropped, and a corpus with fewer sentences than a batch is refused. Files and column are
    as in `read_blocks`.
    """
    sentences = 0
    for block in read_blocks(files, column=column):
        sentences += len(block.sentences)
        if sentences >= most * batch_size:
            break
    if sentences < batch_size:
        raise InputError(too_short(files, sentences, batch_size))
    sizes = [batch_size] * min(sentences // batch_size, most)
    for batch, _ in span_batches(files, vocabulary, sizes, [Span(Position(), sentences)], column):
        yield batch


def span_batches(
    files: Sequence[str],
    vocabulary: Lexicon,
    sizes: Iterable[int],
    spans: Sequence[Span],
    column: str | None = None,
) -> Iterator[tuple[Batch, tuple[Span, ...]]]:
    """Streams the sentences of spans, in this order, as batches of given sizes, with the spans that remain.

    The sentences before and after the end of a span are not neighbours in the corpus. They may share a batch,
    but there they never have the same document id. Files and column are as in `read_blocks`. Fewer sentences
    than the sizes ask for are refused.
    """
    wanted = iter(sizes)
    size = next(wanted, None)
    if size is None:
        return

    parts: list[Encoded] = []
    documents: list[int] = []
    pieces: list[int] = []

    for piece, block, left in _blocks_of_spans(files, spans, column):
        count = min(left, len(block.sentences))
        encoded = vocabulary.encode(block.sentences[:count])
        ends = np.cumsum(encoded.lengths)
        used = 0

        while used < count:
            end = min(count, used + size - len(documents))
            parts.append(_slice(encoded, ends, used, end))
            documents += block.documents[used:end]
            pieces += [piece] * (end - used)
            used = end

            if len(documents) == size:
                position = block.position(end - 1)
                rest = (Span(position, left - end),) if left > end else ()
                yield _in_pieces(_batch(parts, documents), pieces), (*rest, *spans[piece + 1 :])
                size = next(wanted, None)
                if size is None:
                    return
                parts, documents, pieces = [], [], []

    raise InputError(_has_shrunk(files))


def _blocks_of_spans(
    files: Sequence[str], spans: Sequence[Span], column: str | None
) -> Iterator[tuple[int, Block, int]]:
    """The blocks of text of each span: its index, a block, and the span's sentences from there to its end."""
    for piece, span in enumerate(spans):
        left = span.sentences
        for block in read_blocks(files, span.start, column=column) if left else ():
            yield piece, block, left
            left -= len(block.sentences)
            if left <= 0:
                break


def _in_pieces(batch: Batch, pieces: list[int]) -> Batch:
    """A batch whose documents end where a span ends, if its sentences are of several spans."""
    if pieces[0] == pieces[-1]:
        return batch
    spans = torch.tensor(pieces, dtype=torch.int64, device="cpu")
    new = (batch.document_ids.diff() != 0) | (spans.diff() != 0)
    documents = torch.cat([new.new_zeros(1, dtype=torch.int64), new.cumsum(0)])
    return batch._replace(document_ids=documents, pieces=spans)


def equal_shares(total: int, parts: int) -> list[int]:
    """The sizes of parts of a total that differ by at most one; the larger ones come first."""
    return [total // parts + (part < total % parts) for part in range(parts)]


def split(
    files: Sequence[str], spans: Sequence[Span], parts: int, column: str | None = None
) -> tuple[tuple[Span, ...], ...]:
    """Divides the sentences of spans into consecutive parts of sizes that differ by at most one.

    The text up to the last cut is read, to find where each part begins. Files and column are as in
    `read_blocks`.
    """
    waiting = list(reversed(spans))
    shares = []
    for size in equal_shares(sum(span.sentences for span in spans), parts):
        share = []
        while size:
            span = waiting.pop()
            if span.sentences > size:
                waiting.append(Span(_after(files, span.start, size, column), span.sentences - size))
                span = Span(span.start, size)
            share.append(span)
            size -= span.sentences
        shares.append(tuple(share))
    return tuple(shares)


def _after(files: Sequence[str], start: Position, sentences: int, column: str | None) -> Position:
    """Where reading continues after this many sentences from `start`, at least 1."""
    for block in read_blocks(files, start, column=column):
        if sentences <= len(block.sentences):
            return block.position(sentences - 1)
        sentences -= len(block.sentences)
    raise InputError(_has_shrunk(files))


def _has_shrunk(files: Sequence[str]) -> str:
    return f"the corpus has changed: {', '.join(files)}: fewer sentences than when the run started"


def too_short(files: Sequence[str], sentences: int, batch_size: int, ranks: int = 1) -> str:
    """The error message for a corpus with fewer sentences than a batch, or than one for each rank."""
    names = ", ".join(files)
    if sentences == 0:
        return f"the corpus is empty: no sentence in {names}"
    processes = f" on each of {ranks} processes" if ranks > 1 else ""
    return (
        f"the corpus is shorter than a batch{processes}: {sentences} sentences in {names}, batch size "
        f"{batch_size}; lower the batch size or give more text"
    )


def _slice(encoded: Encoded, ends: NDArray[np.int64], first: int, last: int) -> Encoded:
    """Sentences first to last - 1; `ends` is the cumulative sum of the lengths."""
    begin = ends[first - 1] if first else 0
    return Encoded(encoded.ids[begin : ends[last - 1]], encoded.lengths[first:last])


def _batch(parts: Sequence[Encoded], documents: list[int]) -> Batch:
    ids = np.concatenate([part.ids for part in parts])
    lengths = np.concatenate([part.lengths for part in parts])
    tokens, sizes = pad(Encoded(ids, lengths))
    return Batch(tokens, sizes, torch.tensor(documents, dtype=torch.int64, device="cpu"))


class Sample(NamedTuple):
    """B sentences from any places of a corpus."""

    tokens: Tensor  # (B, L) int64; padded with 0
    lengths: Tensor  # (B,) int64, 1..L
    rows: Tensor  # (B,) int64, the indices of the sentences in the corpus


class Corpus:
    """The encoded sentences of text files and tables; it takes four bytes of memory per word.

    Files and column are as in `fastqt.sentences.text.read_blocks`.

    Attributes:
        texts: (n, 1), the fingerprint of each sentence.
    """

    _ahead: EncodedAhead | None = None  # which has the ids of texts that are not encoded yet

    def __init__(self, files: Sequence[str], vocabulary: Lexicon, *, column: str | None = None) -> None:
        parts, texts = [], []
        for block in read_blocks(files, column=column):
            parts.append(vocabulary.encode(block.sentences))
            texts.append(fingerprints(block.sentences))
        self._keep(parts, texts)

    def _keep(self, parts: Sequence[Encoded], texts: Sequence[NDArray[np.uint64]], width: int = 1) -> None:
        """Takes the sentences of all parts, one part after the other."""
        self.texts = np.concatenate([np.zeros(0, np.uint64), *texts]).reshape(-1, width)
        self._ids = np.concatenate([np.zeros(0, np.int32), *(part.ids.astype(np.int32) for part in parts)])
        self._lengths = np.concatenate([np.zeros(0, np.int64), *(part.lengths for part in parts)])
        self._starts = np.cumsum(self._lengths) - self._lengths

    def __len__(self) -> int:
        return len(self.texts)

    def sample(self, rows: NDArray[np.int64]) -> Sample:
        """The sentences with the indices `rows`, (B,) int64, in this order."""
        if self._ahead is not None:
            self._wait(self._ahead, rows)
        lengths = self._lengths[rows]
        words = [self._ids[start : start + n] for start, n in zip(self._starts[rows], lengths, strict=True)]
        tokens, sizes = pad(Encoded(np.concatenate(words).astype(np.int64), lengths))
        return Sample(tokens, sizes, torch.from_numpy(rows))

    def _wait(self, ahead: EncodedAhead, texts: NDArray[np.int64]) -> None:
        self._ids, self._starts, self._lengths, complete = ahead.wait(texts)
        if complete:
            self._ahead = None

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


class TripletCorpus(Corpus):
    """The encoded rows of files as `read_triplets` reads them; it takes four bytes of memory per word.

    `width` is the number of columns; the texts are encoded with `prompts` in front. Files without a row are
    refused. With `waits` texts are not encoded before `encode_ahead` is called, unless they are so many that
    they would take too much memory meanwhile.

    Attributes:
        texts: (n, width), the fingerprint of each text without its prompt.
    """

    def __init__(
        self,
        files: Sequence[str],
        vocabulary: Lexicon,
        *,
        width: int | None = None,
        prompts: Prompts | None = None,
        waits: bool = False,
    ) -> None:
        parts, texts, prompts = [], [], prompts or Prompts()
        waiting: list[str] = []
        characters = 0
        for rows in read_triplets(files, width):
            width = len(rows[0])
            waiting += [text for row in prompts.of_rows(rows) for text in row]
            characters += sum(map(len, waiting[-len(rows) * width :]))
            texts.append(fingerprints(text for row in rows for text in row))
            if not waits or characters > MOST_WAITING:
                parts.append(vocabulary.encode(waiting))
                waiting = []
        if width is None or not texts:
            raise InputError(f"the corpus is empty: no row in {', '.join(files)}")
        self.width = width
        self._keep(parts, texts, width)
        self._vocabulary, self._waiting = vocabulary, waiting

    def encode_ahead(self, order: NDArray[np.int64]) -> None:
        """Begins to encode the texts that wait, in a thread; `order`, (n,), has the rows as they are read."""
        if self._waiting:
            texts = (order[:, None] * self.width + np.arange(self.width)).reshape(-1)
            self._ahead = EncodedAhead(self._vocabulary, self._waiting, texts)
        self._waiting = []

    def sample(self, rows: NDArray[np.int64]) -> Sample:
        """The rows with the indices `rows`, (B,) int64, in this order.

        Of C columns these are tokens (C B, L) and lengths (C B,): all anchors, then all positives, and so on.
        """
        texts = (rows * self.width + np.arange(self.width)[:, None]).reshape(-1)
        return super().sample(texts)._replace(rows=torch.from_numpy(rows))
