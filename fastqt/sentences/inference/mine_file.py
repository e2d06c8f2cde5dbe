"""Mines hard negatives for a file of pairs, and writes what `fastqt train` reads."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias, get_args

from fastqt.errors import InputError
from fastqt.sentences.inference.encoder import SentenceEncoder
from fastqt.sentences.inference.mine import Negatives, mine
from fastqt.sentences.options.inference import MineOptions
from fastqt.sentences.runs.files import check_can_be_written, check_ending, write_atomically
from fastqt.sentences.runs.run_files import check_is_not_read
from fastqt.sentences.text import read_blocks
from fastqt.sentences.text.corpus import read_triplets
from fastqt.sentences.text.reader import check_bytes, check_stdin_once

ENDING = ".tsv"
Format: TypeAlias = Literal["triplets", "tuples"]


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
    encoder: SentenceEncoder,
    pairs: Sequence[str],
    corpus: Sequence[str],
    out: str | Path,
    options: MineOptions | None = None,
    *,
    format: Format = "triplets",
) -> Mined:
    """Writes a .tsv file in which pairs have hard negatives, and returns its figures.

    The documents are the sentences of `corpus` and the positives of all pairs, each text once. A text that is
    a query's own text is one of its positives, so that it does not become its negative.

    Args:
        encoder: the model whose cosines are compared.
        pairs: .tsv files whose lines are a query, a tab and its positive, see
            `fastqt.sentences.text.corpus.read_triplets`. A query may stand in several lines.
        corpus: text files of further documents, as of `fastqt.sentences.text.read_blocks`; may be empty.
        out: the file to write, whose name ends in .tsv.
        options: which candidates become negatives.
        format: "triplets" writes a row for each negative; "tuples" writes one for each pair, with all of its
            negatives, and leaves out pairs that have fewer than were wanted.

    Raises:
        InputError: a file cannot be read or written, or an option is out of its range; no negative was found.
    """
    options = options or MineOptions()
    if format not in get_args(Format):
        raise InputError(f"format: want 'triplets' or 'tuples', got {format!r}")
    check_ending(out, ENDING)
    check_can_be_written(out)
    check_is_not_read(out, [*pairs, *corpus])
    check_stdin_once("pairs and corpus", [*pairs, *corpus])

    positives_of = _read_pairs(pairs)
    further = (sentence for block in read_blocks(corpus) for sentence in block.sentences)
    documents = list(dict.fromkeys(chain(further, *positives_of.values())))
    if unfit := next((text for text in documents if "\t" in text), None):
        raise InputError(f"corpus: want sentences without a tab, which parts columns, got {unfit!r:.100}")
    check_bytes(4 * len(documents) * encoder.model.embedding_dim, "corpus: the vectors of its sentences")

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
