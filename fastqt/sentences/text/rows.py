"""Rows of texts, each a query, its positive and any hard negatives: from lines with tabs, and from tables."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fastqt.errors import InputError, one_line
from fastqt.sentences.text.reader import numbered_lines
from fastqt.sentences.text.tables import is_table, read_columns

ROWS_TOGETHER = 4096  # rows that are read, and encoded, at a time
COMPRESSED = (".gz", ".xz")
# What the columns of a table are called, in the data sets of the field.
QUERIES = ("query", "anchor", "question", "sentence1")
POSITIVES = ("positive", "document", "passage", "answer", "sentence2")
NEGATIVE = re.compile(r"(hard_)?neg(ative)?s?(_\d+)?")

Numbered = Iterator[tuple[str, list[str]]]  # where a row is, and its texts


def read_triplets(files: Sequence[str], width: int | None = None) -> Iterator[list[list[str]]]:
    """Streams the rows of files: a query or anchor, its positive and any hard negatives.

    By their ending files are .csv with a line of names, .jsonl, or tables (`is_table`), whose columns go by
    these names: query, anchor, question or sentence1; positive, document, passage, answer or sentence2; and
    negative, neg or negative_1, … Others have a row in each line, with tabs between the texts. Files but for
    tables may be compressed as .gz or .xz.

    All rows have as many columns, by default as the first one, at least 2, and text in each. White space
    around a text is removed, and a line break within one is a blank. Lines that are blank are no rows.
    """
    rows: list[list[str]] = []
    first = f"{width} columns"

    for path in files:
        for where, texts in _reader_of(path)(path):
            row = [text.replace("\n", " ").strip() for text in texts]
            if width is None:
                width, first = len(row), f"{len(row)} columns as in {where} of {path}"
            if len(row) != width:
                raise InputError(f"{path}: {where}: want {first}, got {len(row)}")
            if not all(row):
                raise InputError(
                    f"{path}: {where}: want text in each column, got none in column {row.index('') + 1}"
                )

            rows.append(row)
            if len(rows) == ROWS_TOGETHER:
                yield rows
                rows = []

    if rows:
        yield rows


def _reader_of(path: str) -> Callable[[str], Numbered]:
    if is_table(path):
        return _of_table
    file = Path(path)
    ending = file.with_suffix("").suffix if file.suffix in COMPRESSED else file.suffix
    return {".csv": _of_csv, ".jsonl": _of_jsonl}.get(ending, _of_lines)


def _of_lines(path: str) -> Numbered:
    for number, line in numbered_lines(path):
        if not line.strip():
            continue
        texts = line.split("\t")
        if len(texts) < 2:
            raise InputError(
                f"{path}: line {number}: want an anchor, a positive and any hard negatives with a "
                "tab between them, got 1 column"
            )
        yield f"line {number}", texts


def _of_csv(path: str) -> Numbered:
    reader = csv.reader((f"{line}\n" for _, line in numbered_lines(path)), strict=True)
    try:
        header = next(reader, [])
        columns = [header.index(name) for name in chosen_columns(header, path)]
        for cells in reader:
            where = f"line {reader.line_num}"
            if not cells:
                continue
            if len(cells) != len(header):
                raise InputError(
                    f"{path}: {where}: want {len(header)} columns as in line 1, got {len(cells)}"
                )
            yield where, [cells[column] for column in columns]
    except csv.Error as error:
        raise InputError(f"{path}: line {reader.line_num}: {one_line(error)}") from None


def _of_jsonl(path: str) -> Numbered:
    names: list[str] = []
    for number, line in numbered_lines(path):
        if not line.strip():
            continue
        where = f"line {number}"
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict):
            raise InputError(f"{path}: {where}: want an object of JSON, got {line!r:.100}")

        names = names or chosen_columns(list(values), path)
        texts: list[Any] = []
        for name in names:
            value = values.get(name)
            texts += value if isinstance(value, list) and NEGATIVE.fullmatch(name) else [value]
        for text in texts:
            if not isinstance(text, str):
                raise InputError(f"{path}: {where}: want texts of {', '.join(names)}, got {text!r:.100}")
        yield where, texts


def _of_table(path: str) -> Numbered:
    for number, texts in read_columns(path, chosen_columns):
        yield f"row {number}", texts


def chosen_columns(names: Sequence[str], path: str | Path) -> list[str]:
    """Of the columns of a table those of the query, the positive and the negatives, by their names."""
    chosen = []
    for what, known in (("query", QUERIES), ("positive", POSITIVES)):
        name = next((name for name in known if name in names), None)
        if name is None:
            columns = one_line(", ".join(names)) or "no columns"
            raise InputError(
                f"{path}: want a column of the {what}, called {' or '.join(known)}, got {columns}"
            )
        chosen.append(name)
    return [*chosen, *(name for name in names if NEGATIVE.fullmatch(name))]
