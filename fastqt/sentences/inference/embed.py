"""Turns a text file into a file of sentence vectors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from fastqt.errors import InputError
from fastqt.sentences.inference.encoder import TextEncoder
from fastqt.sentences.options.commands import Side
from fastqt.sentences.runs.files import check_ending, write_atomically
from fastqt.sentences.runs.lexicon import check_is_not_read
from fastqt.sentences.text import reader

ENDING = ".npy"
LINES = 8192  # that are encoded together, so that memory does not grow with short lines


def write_vectors(
    encoder: TextEncoder,
    source: str,
    out: str | Path,
    *,
    normalize: bool = True,
    side: Side = "query",
) -> tuple[int, int]:
    """Writes the vectors of the lines of a text file to an .npy file; returns the shape of the matrix.

    The matrix is float32, with a row for each line, in order; that of a blank line is zero. The text is
    streamed, so memory does not grow with it: `source` as in `fastqt.sentences.text.read_blocks`, and `out`
    as in `fastqt.sentences.runs.files.write_atomically`. `normalize` scales each vector to norm 1; for
    QuickThoughts, each of its two halves. `side` is as in `SentenceEncoder.encode`.
    """
    check_ending(out, ENDING)
    check_is_not_read(out, [source])
    rows, width = 0, encoder.width
    encode = partial(encoder.encode, normalize=normalize, side=side)

    def write(partial: Path) -> None:
        nonlocal rows
        blank = True
        with partial.open("wb") as file:
            _write_header(file, rows, width)
            for lines in _parts(source):
                vectors = _vectors_of_lines(encode, lines, width)
                file.write(vectors.data)
                rows += len(vectors)
                blank = blank and not any(lines)
            if blank:
                raise InputError(f"nothing to embed: no sentence in {source}")
            # The number of rows is known only now. numpy pads the header, so that the final one fits in
            # place.
            file.seek(0)
            _write_header(file, rows, width)

    try:
        write_atomically(out, write)
    except OSError as error:
        raise InputError(f"cannot write {out}: {error.strerror}") from error
    return rows, width


def _parts(source: str) -> Iterator[list[str]]:
    lines, size = list[str](), 0
    for _, text in reader.numbered_lines(source):
        lines.append(text.strip())
        size += len(text)
        if len(lines) == LINES or size >= reader.READ_BYTES:
            yield lines
            lines, size = [], 0
    if lines:
        yield lines


def _vectors_of_lines(
    encode: Callable[[list[str]], NDArray[np.float32]], lines: list[str], width: int
) -> NDArray[np.float32]:
    vectors = np.zeros((len(lines), width), dtype=np.float32)
    if sentences := [line for line in lines if line]:
        vectors[[bool(line) for line in lines]] = encode(sentences)
    return vectors


def _write_header(file: IO[bytes], rows: int, width: int) -> None:
    header = {
        "descr": npy.dtype_to_descr(np.dtype(np.float32)),
        "fortran_order": False,
        "shape": (rows, width),
    }
    npy.write_array_header_1_0(file, header)
