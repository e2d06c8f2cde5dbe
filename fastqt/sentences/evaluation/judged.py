"""Sets of queries, documents and judgements in the file format of BEIR, and the exact search of one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from fastqt.errors import InputError, one_line
from fastqt.sentences.evaluation.ranking import DEPTH, Groups, figures_of, groups_of
from fastqt.sentences.evaluation.vectors import Vectors
from fastqt.sentences.inference.search import Best
from fastqt.sentences.json_text import field, parse_object
from fastqt.sentences.text.reader import table_lines

CORPUS, QUERIES, QRELS = "corpus", "queries", "qrels/test"  # files without their suffixes
COMPRESSED = ("", ".gz", ".xz")
RELEVANCE = re.compile(r"[+-]?[0-9]{1,9}")
DOCUMENTS = 2048  # that queries are compared with at a time


@dataclass(frozen=True)
class JudgedSet:
    """Queries, documents, and how relevant some of these are to the queries."""

    queries: dict[str, str]  # those that have judgements
    documents: dict[str, str]  # those that have text
    qrels: dict[str, dict[str, int]]  # of each query: the relevance of documents

    def texts(self) -> Iterable[str]:
        """All texts of the set."""
        return chain(self.queries.values(), self.documents.values())

    def check(self, options: object) -> None:
        """Finds nothing wrong: `read_judged` has."""

    def search(self, vectors: Vectors) -> Found:
        """Compares the queries with all documents.

        A document that has the query's own identifier has a cosine of -inf. Cosines are rounded to six
        decimals, so that rounding errors of float32 do not give different ranks to equal cosines.
        """
        names, texts = list(self.documents), list(self.documents.values())
        row_of = {name: row for row, name in enumerate(names)}
        self_rows = np.array([row_of.get(query, -1) for query in self.queries])
        pairs = [
            (query, row_of[name], relevance)
            for query, judged in enumerate(self.qrels.values())
            for name, relevance in judged.items()
            if name in row_of
        ]
        judged = np.array(pairs, np.int64).reshape(-1, 3)
        judged_cosines = np.zeros(len(judged), np.float32)
        queries = F.normalize(torch.from_numpy(vectors(list(self.queries.values()))), dim=1)

        best = Best(len(queries), DEPTH)
        left_out = torch.zeros(len(queries), dtype=torch.int64, device="cpu")
        for begin in range(0, len(texts), DOCUMENTS):
            block = F.normalize(torch.from_numpy(vectors(texts[begin : begin + DOCUMENTS])), dim=1)
            cosines = (queries @ block.T).round(decimals=6)
            (inside,) = np.nonzero((begin <= self_rows) & (self_rows < begin + len(block)))
            cosines[inside, self_rows[inside] - begin] = -torch.inf

            (inside,) = np.nonzero((begin <= judged[:, 1]) & (judged[:, 1] < begin + len(block)))
            judged_cosines[inside] = cosines[judged[inside, 0], judged[inside, 1] - begin]

            everything, before = torch.cat([best.scores, cosines], dim=1), best.scores[:, -1:]
            best.add(cosines, begin)
            last = best.scores[:, -1:]
            left_out *= (before == last).any(dim=1)
            left_out += (everything == last).sum(dim=1) - (best.scores == last).sum(dim=1)
        return Found(best.scores.numpy(), best.rows.numpy(), left_out.numpy(), judged, judged_cosines)

    def evaluate(self, vectors: Vectors, options: object) -> dict[str, Any]:
        """The mean of each figure of `fastqt.sentences.evaluation.ranking_metrics` over the queries."""
        answers = self.search(vectors)
        figures = [
            figures_of(answers.groups(query), np.array(list(judged.values()), np.int64))
            for query, judged in enumerate(self.qrels.values())
        ]
        means = {name: float(np.mean([each[name] for each in figures])) for name in figures[0]}
        sizes = {"queries": len(self.queries), "documents": len(self.documents)}
        return {**means, "sizes": {**sizes, "judgements": sum(map(len, self.qrels.values()))}}


class Found(NamedTuple):
    """What a search found for Q queries."""

    cosines: NDArray[np.float32]  # (Q, n), the 1,000 highest or all, best first
    rows: NDArray[np.int64]  # (Q, n) of the documents
    left_out: NDArray[np.int64]  # (Q,) documents with the cosine of the last one, beyond the 1,000
    judged: NDArray[np.int64]  # (J, 3): a query, the row of a document and its relevance, query by query
    judged_cosines: NDArray[np.float32]  # (J,)

    def groups(self, query: int) -> Groups:
        """The documents of a query in groups of equal cosines; the last group may go on beyond the 1,000."""
        cosines, left_out = self.cosines[query], self.left_out[query]
        begin, end = np.searchsorted(self.judged[:, 0], [query, query + 1])
        return groups_of(
            cosines[np.isfinite(cosines)],
            self.judged_cosines[begin:end],
            self.judged[begin:end, 2],
            left_out=int(left_out) if np.isfinite(cosines[-1]) else 0,
        )


def judged_sets(data: Path) -> dict[str, Path]:
    """The folders of a directory, and the directory itself, that hold a set, by the folders' names."""
    folders = [data, *sorted(path for path in data.iterdir() if path.is_dir())]
    return {
        folder.resolve().name: folder for folder in folders if _file(folder, CORPUS, ".jsonl") is not None
    }


def read_judged(folder: Path) -> JudgedSet:
    """Reads a set in BEIR's format: corpus.jsonl, queries.jsonl and qrels/test.tsv, or these as .gz or .xz.

    The text of a document is its title and its text with a blank between them; line breaks become blanks too.
    A document without text is left out, and so are queries without judgements. A document of judgements need
    not be in the corpus.
    """
    qrels_path = _wanted(folder, QRELS, ".tsv")
    qrels = _read_qrels(qrels_path)
    documents = dict(_read_texts(_wanted(folder, CORPUS, ".jsonl"), ("title", "text")))
    queries_path = _wanted(folder, QUERIES, ".jsonl")
    queries = dict(_read_texts(queries_path, ("text",)))

    for query in qrels:
        if query not in queries:
            raise InputError(f"{qrels_path}: want queries of {queries_path}, got {one_line(query, 40)!r}")
        if not queries[query]:
            raise InputError(
                f"{queries_path}: want text in each query that has judgements, got none in "
                f"{one_line(query, 40)!r}"
            )
    documents = {name: text for name, text in documents.items() if text}
    if not documents:
        raise InputError(f"{_wanted(folder, CORPUS, '.jsonl')}: want documents with text, got none")
    return JudgedSet({query: queries[query] for query in qrels}, documents, qrels)


def _read_texts(path: Path, names: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """The identifiers and the texts of a file that has a JSON object in each line."""
    seen: set[str] = set()
    for number, line in enumerate(table_lines(path), start=1):
        where = f"{path}: line {number}"
        values = parse_object(line, where)
        identifier: str = field(values, "_id", str, where)
        if identifier in seen:
            raise InputError(f"{where}: want each _id once, got {one_line(identifier, 40)!r} again")
        seen.add(identifier)

        # A title is often absent, or null.
        parts = [
            field(values, name, str, where)
            for name in names
            if name == "text" or values.get(name) is not None
        ]
        text = " ".join(" ".join(parts).split())
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InputError(
                f"{where}: want text that UTF-8 can hold, got half of a surrogate pair"
            ) from None
        yield identifier, text


def _read_qrels(path: Path) -> dict[str, dict[str, int]]:
    """The judgements of a table: a header, and lines with a query, a document and its relevance."""
    qrels: dict[str, dict[str, int]] = {}
    for number, line in enumerate(table_lines(path), start=1):
        columns = line.split("\t")
        if len(columns) != 3:
            raise InputError(
                f"{path}: line {number}: want a query, a document and its relevance with tabs between them, "
                f"got {len(columns)} columns"
            )

        query, document, relevance = columns
        if not RELEVANCE.fullmatch(relevance):
            if number == 1:
                continue
            raise InputError(
                f"{path}: line {number}: want a whole number as the relevance, got "
                f"{one_line(relevance, 40)!r}"
            )

        if document in qrels.setdefault(query, {}):
            raise InputError(
                f"{path}: line {number}: want each document once for a query, got "
                f"{one_line(document, 40)!r} again for {one_line(query, 40)!r}"
            )
        qrels[query][document] = int(relevance)
    if not qrels:
        raise InputError(f"{path}: want judgements below the header, got none")
    return qrels


def _wanted(folder: Path, name: str, suffix: str) -> Path:
    path = _file(folder, name, suffix)
    if path is None:
        raise InputError(f"no such file: {folder / (name + suffix)}")
    return path


def _file(folder: Path, name: str, suffix: str) -> Path | None:
    """A file of a set, which may be compressed."""
    paths = (folder / (name + suffix + end) for end in COMPRESSED)
    return next((path for path in paths if path.exists()), None)
