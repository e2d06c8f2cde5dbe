"""Searches an index that `build_index` wrote."""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastqt.errors import InputError
from fastqt.sentences.inference.encoder import SentenceEncoder
from fastqt.sentences.inference.index.array_file import ArrayFile
from fastqt.sentences.inference.index.searchers import SEARCHERS, Hits, Searcher
from fastqt.sentences.inference.search import Neighbor, encode_queries
from fastqt.sentences.json_text import field
from fastqt.sentences.text import Block, read_blocks
from fastqt.sentences.text.reader import LONGEST_LINE

FORMAT = 1
RECALL_AT = 10  # neighbours of which recall is measured


class Recall(NamedTuple):
    """What share of the exact nearest neighbours a search finds."""

    value: float
    at: int  # of how many nearest neighbours
    queries: int  # sentences of the corpus, each of which looked for others


class Index:
    """The sentences of a corpus and what finds the nearest of them, in a file that `fastqt index` wrote.

    The file is mapped, and a search reads only what it needs, after that was verified by its checksums. It
    must stay as it is while it is in use. It is refused where faiss is not installed and the kind needs it.

    Attributes:
        kind: "flat" or "ivf".
        files: the names of the corpus's files when the index was made.
        effort: of a search: the lists that "ivf" reads.
        recall: with that effort, as it was measured when the index was made.
    """

    def __init__(self, path: str | Path) -> None:
        file = ArrayFile(path)
        self.path, header = file.path, file.header
        if (number := field(header, "format", int, path)) != FORMAT:
            raise InputError(f"{path} has format {number}; this fastqt reads format {FORMAT}")

        rows, self.width = field(header, "rows", int, path), field(header, "width", int, path)
        self.kind: str = field(header, "kind", str, path)
        if self.kind not in SEARCHERS:
            raise InputError(f"{path} is damaged: kind: want flat or ivf, got another one")
        if not (1 <= rows < 2**40 and 1 <= self.width < 2**24):
            raise InputError(
                f"{path} is damaged: want a row and a column at least, got {rows} x {self.width}"
            )

        self._identity: str = field(header, "identity", str, path)
        self._corpus: str = field(header, "corpus", str, path)
        self._lines = file.array("lines", "int64", (rows,))
        self._ends = file.array("ends", "int64", (rows,))
        self._text = file.array("text", "uint8", file.shape("text") or (0,))

        self.files, self._firsts = self._checked_files(header, rows)
        self.searcher: Searcher = SEARCHERS[self.kind](file, rows, self.width)
        self.effort = self._checked_effort(header)
        self.recall = _recall(header, path)

    def __len__(self) -> int:
        return len(self._lines)

    def __str__(self) -> str:
        """What it holds, and how good its searches are."""
        parts = [f"{len(self):,} sentences x {self.width}, {self.kind}"]
        if self.kind == "ivf":
            value, at, queries = self.recall
            parts.append(f"a search reads {self.effort:,} of {self.searcher.most_effort:,} lists")
            parts.append(f"recall@{at} {value:.4f} of {queries:,} sentences of the corpus")
        return "; ".join(parts)

    def check_model(self, encoder: SentenceEncoder) -> None:
        """Checks that the index was made by this model."""
        if (encoder.identity or "") != self._identity:
            raise InputError(
                f"{self.path} was made by another model, whose vectors mean something else; make it again "
                "with fastqt index"
            )

    def check_corpus(self, corpus: Sequence[str]) -> None:
        """Checks that a corpus has the sentences of the index, in the same lines. It is read as a whole."""
        digest = CorpusDigest()
        for block in read_blocks(corpus):
            digest.add(block)
        if digest.hexdigest() != self._corpus:
            raise InputError(
                f"{self.path} was made from another corpus than {', '.join(corpus)}, or that has changed; "
                "make it again with fastqt index"
            )

    def search(self, encoder: SentenceEncoder, queries: Sequence[str], k: int = 5) -> list[list[Neighbor]]:
        """The k sentences with the highest cosines to each query, best first, or all if there are fewer.

        An index of kind "flat" finds those that `nearest` does; the others miss as many as `recall` says. The
        encoder is the model that made the index.
        """
        self.check_model(encoder)
        scores, rows = self.search_vectors(encode_queries(encoder, queries, k).numpy(), k)
        return [
            [self.neighbor(row, score) for row, score in zip(*nearest, strict=True)]
            for nearest in zip(rows.tolist(), scores.tolist(), strict=True)
        ]

    def search_vectors(self, queries: NDArray[np.float32], k: int, effort: int | None = None) -> Hits:
        """The m = min(k, all rows) highest cosines to each query and their rows, (Q, m) float32 and int64.

        The best are first; among equal ones, the first rows. Queries are (Q, D) float32 at norm 1. The effort
        is by default that of the index.
        """
        if queries.ndim != 2 or queries.shape[1] != self.width:
            raise InputError(f"queries: want vectors of width {self.width}, got shape {queries.shape}")
        if not np.isfinite(queries).all():
            raise InputError("queries: want finite vectors, got NaN or infinity")
        if effort is not None and effort < 1:
            raise InputError(f"effort: want at least 1, got {effort}")
        scores, rows = self.searcher.search(
            np.ascontiguousarray(queries, np.float32),
            min(k, len(self)),
            min(max(effort or self.effort, self.searcher.least_effort), self.searcher.most_effort),
        )
        if rows.min() < 0 or rows.max() >= len(self):
            raise InputError(
                f"{self.path} is damaged: it has rows of other numbers than 0 to {len(self) - 1:,}"
            )
        order = np.lexsort((rows, -scores), axis=1)
        return np.take_along_axis(scores, order, 1), np.take_along_axis(rows, order, 1)

    def neighbor(self, row: int, cosine: float) -> Neighbor:
        """The sentence of a row."""
        begin = int(self._ends.read(row - 1, row)[0]) if row else 0
        end, line = int(self._ends.read(row, row + 1)[0]), int(self._lines.read(row, row + 1)[0])
        if not 0 <= begin < end <= min(len(self._text), begin + LONGEST_LINE):
            raise InputError(f"{self.path} is damaged: a sentence of bytes {begin:,} to {end:,}")
        try:
            sentence = self._text.read(begin, end).tobytes().decode()
        except UnicodeDecodeError as error:
            raise InputError(f"{self.path} is damaged: a sentence is not UTF-8: {error.reason}") from error
        return Neighbor(cosine, sentence, self.files[bisect.bisect_right(self._firsts, row) - 1], line)

    def _checked_files(self, header: dict[str, Any], rows: int) -> tuple[list[str], list[int]]:
        """The names of the corpus's files that hold sentences, and the first row of each."""
        files, firsts = field(header, "files", list, self.path), field(header, "firsts", list, self.path)
        if not all(isinstance(name, str) for name in files) or not all(type(row) is int for row in firsts):
            raise InputError(f"{self.path} is damaged: want names in files, and integers in firsts")
        if (
            len(files) != len(firsts)
            or firsts[:1] != [0]
            or firsts != sorted(set(firsts))
            or firsts[-1] >= rows
        ):
            raise InputError(f"{self.path} is damaged: firsts: want the first row of each file")
        return files, firsts

    def _checked_effort(self, header: dict[str, Any]) -> int:
        effort: int = field(header, "effort", int, self.path)
        least, most = self.searcher.least_effort, self.searcher.most_effort
        if not least <= effort <= most:
            raise InputError(f"{self.path} is damaged: effort: want {least:,} to {most:,}")
        return effort


def _recall(header: dict[str, Any], path: str | Path) -> Recall:
    stored = field(header, "recall", dict, path)
    return Recall(
        field(stored, "value", float, path),
        field(stored, "at", int, path),
        field(stored, "queries", int, path),
    )


class CorpusDigest:
    """The SHA-256 of sentences and of the lines that hold them, whatever the files are called."""

    def __init__(self) -> None:
        self._sha256 = hashlib.sha256()

    def add(self, block: Block) -> None:
        """Adds the next block of the corpus."""
        for line, sentence in zip(block.lines, block.sentences, strict=True):
            self._sha256.update(f"{block.file}:{line}:{sentence}\n".encode())

    def hexdigest(self) -> str:
        """The digest of what was added so far."""
        return self._sha256.hexdigest()
