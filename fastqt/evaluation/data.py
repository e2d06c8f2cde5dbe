"""The files of the benchmarks: tab-separated columns, a folder a task."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastqt.errors import InputError
from fastqt.text.reader import open_text

SUFFIXES = (".tsv.xz", ".tsv.gz", ".tsv")


class Labelled(NamedTuple):
    """Sentences and their classes."""

    labels: NDArray[np.str_]
    texts: list[str]


class Pairs(NamedTuple):
    """Pairs of sentences; `gold` is a class or a score of each, `subset` where it comes from."""

    gold: NDArray[np.float64]
    first: list[str]
    second: list[str]
    subset: NDArray[np.str_]


def find(data: Path, *names: str) -> list[Path] | None:
    """The files DATA/NAME with one of the three suffixes; None unless all are there."""
    found = [
        next((path for end in SUFFIXES if (path := data / (name + end)).exists()), None) for name in names
    ]
    there = [path for path in found if path is not None]
    return there if len(there) == len(names) else None


def read_labelled(path: Path, *, text: int = 1) -> Labelled:
    """Reads a label in the first column and a sentence in column `text`, counted from 0."""
    rows = _columns(path, text + 1)
    return Labelled(np.array([row[0] for row in rows]), [row[text] for row in rows])


def read_pairs(path: Path, *, gold: int, first: int, subset: int | None = None) -> Pairs:
    """Reads a number in column `gold`, two sentences from column `first` on, and perhaps a subset's name."""
    rows = _columns(path, max(first + 2, gold + 1))
    try:
        numbers = np.array([float(row[gold]) for row in rows])
    except ValueError as error:
        raise InputError(f"{path}: wanted a number in column {gold + 1}: {error}") from None
    names = np.array([path.name.split(".")[0] if subset is None else row[subset] for row in rows])
    return Pairs(numbers, [row[first] for row in rows], [row[first + 1] for row in rows], names)


def _columns(path: Path, wanted: int) -> list[list[str]]:
    with open_text(str(path)) as file:
        try:
            lines = file.read().decode().rstrip("\n").split("\n")
        except UnicodeDecodeError as error:
            raise InputError(f"{path} is not UTF-8: {error}") from None
    rows = [line.split("\t") for line in lines]
    for number, row in enumerate(rows, start=1):
        if len(row) < wanted:
            raise InputError(f"{path}: line {number}: wanted at least {wanted} columns, got {len(row)}")
    return rows
