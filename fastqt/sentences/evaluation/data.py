"""Reads the files of the benchmarks: tab-separated columns, in one folder per task."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastqt.errors import InputError, one_line
from fastqt.sentences.text.reader import table_lines

SUFFIXES = (".tsv.xz", ".tsv.gz", ".tsv")


class LabelledTexts(NamedTuple):
    """Sentences with class labels."""

    labels: NDArray[np.str_]
    texts: list[str]


class Pairs(NamedTuple):
    """Pairs of sentences: `gold` is the class or the score of each pair, `subset` names its source."""

    gold: NDArray[np.float64]
    first: list[str]
    second: list[str]
    subset: NDArray[np.str_]


def find(data: Path, *names: str) -> list[Path]:
    """The files of a task by their paths below the data, without their `SUFFIXES`; those that are there."""
    paths = (
        next((path for end in SUFFIXES if (path := data / (name + end)).exists()), None) for name in names
    )
    return [path for path in paths if path is not None]


def read_labelled(path: Path, *, text: int = 1) -> LabelledTexts:
    """Reads sentences, from the column `text` counted from 0, with labels, from the first column."""
    rows = _columns(path, text)
    return LabelledTexts(np.array([row[0] for row in rows]), [row[text] for row in rows])


def read_pairs(
    path: Path,
    *,
    gold: int,
    first: int,
    subset: int | None = None,
    within: tuple[float, float] = (-np.inf, np.inf),
) -> Pairs:
    """Reads pairs of sentences with a gold score; columns are counted from 0.

    The second sentence is in the column after the first one. Without a column for it, the subset's name is
    that of the file. A score that is not `within` the lowest and the highest one is refused.
    """
    rows = _columns(path, first, first + 1)
    try:
        numbers = np.array([float(row[gold]) for row in rows])
    except ValueError as error:
        raise InputError(f"{path}: want a number in column {gold + 1}: {one_line(error)}") from None
    if not np.isfinite(numbers).all():
        line = int(np.flatnonzero(~np.isfinite(numbers))[0]) + 1
        raise InputError(f"{path}: line {line}: want a finite number in column {gold + 1}")
    low, high = within
    if len(outside := np.flatnonzero((numbers < low) | (numbers > high))):
        raise InputError(
            f"{path}: line {outside[0] + 1}: want a score from {low:g} to {high:g} in column {gold + 1}, got "
            f"{numbers[outside[0]]:g}"
        )
    names = np.array([path.name.split(".")[0] if subset is None else row[subset] for row in rows])
    return Pairs(numbers, [row[first] for row in rows], [row[first + 1] for row in rows], names)


def _columns(path: Path, *texts: int) -> list[list[str]]:
    """The columns of each line, of which some hold a text; labels and scores stand before the last text."""
    rows, wanted = [line.split("\t") for line in table_lines(path)], max(texts) + 1
    for number, row in enumerate(rows, start=1):
        if len(row) < wanted:
            raise InputError(f"{path}: line {number}: want at least {wanted} columns, got {len(row)}")
        for column in texts:
            if not row[column].strip():
                raise InputError(f"{path}: line {number}: want a text in column {column + 1}, got none")
    return rows
