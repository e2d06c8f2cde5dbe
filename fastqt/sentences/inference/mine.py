"""Hard negatives: documents that a model finds near to a query, and that are no positives of it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from fastqt.errors import InputError
from fastqt.sentences.inference.encoder import TextEncoder
from fastqt.sentences.inference.search import best_products, blocks, unit_rows
from fastqt.sentences.options.commands import MineOptions
from fastqt.sentences.runs.files import check_can_be_written, check_ending, write_atomically
from fastqt.sentences.runs.lexicon import check_is_not_read
from fastqt.sentences.text import read_blocks
from fastqt.sentences.text.reader import check_bytes, check_stdin_once
from fastqt.sentences.text.rows import read_triplets

ENDING = ".tsv"
QUERIES = 1024  # that are searched at a time
TIE = 1e-6  # by which equal cosines may differ: each product rounds in an order of its own

Format: TypeAlias = Literal["tuples", "triplets"]


class Negatives(NamedTuple):
    """The negatives of Q queries, nearest first."""

    rows: NDArray[np.int64]  # (Q, n) of the documents; -1 where no more were found
    cosines: NDArray[np.float32]  # (Q, n) of the query with them; -inf where no more were found


def mine(
    queries: NDArray[np.floating],
    documents: NDArray[np.floating],
    positives: Sequence[Sequence[int]],
    options: MineOptions | None = None,
) -> Negatives:
    """Hard negatives of queries: near documents that are no positives of them, by exact search.

    A margin is compared with the lowest cosine that a query has with its positives. Positives are refused
    after `range_max` candidates were taken, and the first `range_min` are passed over after everything else,
    as in sentence-transformers. On the same vectors the negatives are those of its `mine_hard_negatives`;
    random ones are drawn by another generator. Queries (Q, D) are distinct texts, and each has at least one
    positive among the rows of the documents (M, D). Where candidates are not enough, there are fewer.

    Example:
        >>> import numpy as np
        >>> from fastqt.sentences.inference.mine import MineOptions, mine
        >>> documents = np.array([[1.0, 0.0], [1.0, 0.1], [1.0, 0.5], [0.0, 1.0]])
        >>> mine(documents[:1], documents, [[0]], MineOptions(negatives=2)).rows.tolist()
        [[1, 2]]
        >>> mine(documents[:1], documents, [[0]], MineOptions(negatives=2, max_score=0.9)).rows.tolist()
        [[2, 3]]

    Source: Moreira et al. (arXiv:2407.15831) for margins.
    """
    options = options or MineOptions()
    _check(queries, documents)
    depth = options.depth(max(map(len, positives), default=0))
    most = max(map(len, positives), default=0)
    generator = np.random.default_rng(options.seed)

    parts = [
        Negatives(np.zeros((0, options.negatives), np.int64), np.zeros((0, options.negatives), np.float32))
    ]
    units = unit_rows(documents)
    for asked in blocks(len(queries), QUERIES):
        block = unit_rows(queries[asked])
        scores, rows = best_products(
            block, (units[part] for part in blocks(len(units))), depth + most
        ).results()
        cosines = scores.copy()
        for query, relevant in enumerate(positives[asked]):
            pairs = (block[query] @ units[list(relevant)].T).numpy()
            _refuse(cosines[query], rows[query], relevant, float(pairs.min()), options)
        parts.append(_chosen(cosines, rows, depth, options, generator))
    return Negatives(*(np.concatenate(each) for each in zip(*parts, strict=True)))


def _check(queries: NDArray[np.floating], documents: NDArray[np.floating]) -> None:
    for name, vectors in (("queries", queries), ("documents", documents)):
        if not np.isfinite(vectors).all():
            raise InputError(f"{name}: want finite vectors, got NaN or infinity")


def _refuse(
    cosines: NDArray[np.float32],  # (n,) in place: -inf where a candidate is refused
    rows: NDArray[np.int64],  # (n,)
    positives: Sequence[int],
    lowest: float,  # cosine with a positive
    options: MineOptions,
) -> None:
    refused = np.isin(rows, positives)
    if options.absolute_margin is not None:
        refused |= cosines > lowest - options.absolute_margin + TIE
    if options.relative_margin is not None:
        refused |= cosines > lowest - abs(lowest) * options.relative_margin + TIE
    if options.max_score is not None:
        refused |= cosines > options.max_score + TIE
    if options.min_score is not None:
        refused |= cosines < options.min_score - TIE
    cosines[refused] = -np.inf


def _chosen(
    cosines: NDArray[np.float32],  # (Q, n), -inf where a candidate is refused
    rows: NDArray[np.int64],  # (Q, n)
    depth: int,
    options: MineOptions,
    generator: np.random.Generator,
) -> Negatives:
    """The negatives among candidates: refused ones go to the end, then ranks count."""
    order = np.argsort(-cosines, axis=1, kind="stable")[:, options.range_min : depth]
    cosines, rows = np.take_along_axis(cosines, order, axis=1), np.take_along_axis(rows, order, axis=1)

    if options.sampling == "random":
        keys = np.where(np.isfinite(cosines), generator.random(cosines.shape), np.inf)
        drawn = np.sort(np.argsort(keys, axis=1)[:, : options.negatives], axis=1)
        cosines, rows = np.take_along_axis(cosines, drawn, axis=1), np.take_along_axis(rows, drawn, axis=1)

    wanted = options.negatives
    missing = max(wanted - cosines.shape[1], 0)
    cosines = np.pad(cosines[:, :wanted], ((0, 0), (0, missing)), constant_values=-np.inf)
    rows = np.pad(rows[:, :wanted], ((0, 0), (0, missing)), constant_values=-1)
    return Negatives(np.where(np.isfinite(cosines), rows, -1), cosines)


class Mined(NamedTuple):
    """What was mined."""

    pairs: int  # that were read, each counted once
    rows: int  # that were written
    documents: int  # that the queries were compared with
    short: int  # queries with fewer negatives than were wanted

    def __str__(self) -> str:
        return (
            f"{self.rows:,} rows of {self.pairs:,} pairs, with negatives among {self.documents:,} documents; "
            f"{self.short:,} queries have fewer negatives than were wanted"
        )


def mine_pairs(
    encoder: TextEncoder,
    pairs: Sequence[str],
    corpus: Sequence[str],
    out: str | Path,
    options: MineOptions | None = None,
    *,
    format: Format = "tuples",
) -> Mined:
    """Writes a .tsv file in which pairs have hard negatives, and returns its figures.

    The documents are the sentences of `corpus` and the positives of all pairs, each text once. A text that is
    a query's own text is one of its positives, so that it does not become its negative.

    Pairs are .tsv files of queries and positives, as of `read_triplets`, in which a query may stand in
    several lines. "tuples" writes a row for each pair that has as many negatives as were wanted; "triplets"
    one for each negative.
    """
    options = options or MineOptions()
    if format not in get_args(Format):
        raise InputError(f"format: want 'tuples' or 'triplets', got {format!r}")
    check_ending(out, ENDING)
    check_can_be_written(out)
    check_is_not_read(out, [*pairs, *corpus])
    check_stdin_once("pairs and corpus", [*pairs, *corpus])

    positives_of = _read_pairs(pairs)
    further = (sentence for block in read_blocks(corpus) for sentence in block.sentences)
    documents = list(dict.fromkeys(chain(further, *positives_of.values())))
    if unfit := next((text for text in documents if "\t" in text), None):
        raise InputError(f"corpus: want sentences without a tab, which parts columns, got {unfit!r:.100}")
    check_bytes(4 * len(documents) * encoder.width, "corpus: the vectors of its sentences")

    row_of = {text: row for row, text in enumerate(documents)}
    relevant = [
        [row_of[text] for text in dict.fromkeys([*texts, query]) if text in row_of]
        for query, texts in positives_of.items()
    ]
    queries, candidates = encoder.encode(list(positives_of)), encoder.encode(documents, side="document")
    negatives = mine(queries, candidates, relevant, options)
    rows = _rows(positives_of, documents, negatives, options.negatives, format)
    if not rows:
        raise InputError("no negative found: want weaker margins or scores, or a larger range_max or corpus")

    text = "".join("\t".join(row) + "\n" for row in rows)
    try:
        write_atomically(out, lambda partial: partial.write_text(text, encoding="utf-8", newline="\n"))
    except OSError as error:
        raise InputError(f"cannot write {out}: {error.strerror or error}") from error
    short = int((negatives.rows < 0).any(axis=1).sum())
    return Mined(sum(map(len, positives_of.values())), len(rows), len(documents), short)


def _read_pairs(files: Sequence[str]) -> dict[str, list[str]]:
    """The positives of each query, each once."""
    positives_of: dict[str, dict[str, None]] = {}
    for rows in read_triplets(files, 2):
        for query, positive in rows:
            positives_of.setdefault(query, {})[positive] = None
    if not positives_of:
        raise InputError(f"pairs: want a query and its positive in a line, got no line in {', '.join(files)}")
    return {query: list(texts) for query, texts in positives_of.items()}


def _rows(
    positives_of: dict[str, list[str]],
    documents: list[str],
    negatives: Negatives,
    wanted: int,
    format: Format,
) -> list[list[str]]:
    rows = []
    for (query, positives), places in zip(positives_of.items(), negatives.rows.tolist(), strict=True):
        texts = [documents[row] for row in places if row >= 0]
        for positive in positives:
            if format == "triplets":
                rows += [[query, positive, text] for text in texts]
            elif len(texts) == wanted:
                rows.append([query, positive, *texts])
    return rows
