"""Turns a text file into a file of sentence vectors."""

from __future__ import annotations

from pathlib import Path
from typing import IO

import numpy as np
from numpy.lib import format as npy

from fastqt.errors import InputError
from fastqt.runs.checkpoint import replacing
from fastqt.runs.model import SentenceEncoder
from fastqt.text import read_blocks


def write_vectors(
    encoder: SentenceEncoder, source: str, out: str | Path, *, normalize: bool = True
) -> tuple[int, int]:
    """Writes the vectors of the sentences of a text file to an .npy file.

    The text is streamed, so memory does not grow with it.

    Args:
        encoder: the model.
        source: path of the text, see `fastqt.text.read_blocks`. Blank lines are skipped.
        out: path of the .npy file, written atomically: a float32 matrix with one row per sentence, in order.
        normalize: scale each vector to norm 1; for QuickThoughts, each of its two halves.

    Returns:
        The shape of the matrix: (number of sentences, width of a vector).

    Raises:
        InputError: the text cannot be read or holds no sentence, or `out` cannot be written.
    """
    out = Path(out)
    try:
        with replacing(out) as partial, partial.open("wb") as file:
            rows = width = 0
            for block in read_blocks([source]):
                vectors = encoder.encode(block.sentences, normalize=normalize)
                if rows == 0:
                    width = vectors.shape[1]
                    _write_header(file, rows, width)
                file.write(vectors.data)
                rows += len(vectors)
            if rows == 0:
                raise InputError(f"nothing to embed: no sentence in {source}")
            # The number of rows is known only now. numpy pads the header, so that the final one fits in
            # place.
            file.seek(0)
            _write_header(file, rows, width)
    except OSError as error:
        raise InputError(f"cannot write {out}: {error.strerror}") from error
    return rows, width


def _write_header(file: IO[bytes], rows: int, width: int) -> None:
    header = {
        "descr": npy.dtype_to_descr(np.dtype(np.float32)),
        "fortran_order": False,
        "shape": (rows, width),
    }
    npy.write_array_header_1_0(file, header)
