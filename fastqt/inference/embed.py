"""Text files to matrices of sentence vectors, streamed."""

from __future__ import annotations

from pathlib import Path
from typing import IO

import numpy as np
from numpy.lib import format as npy

from fastqt.errors import InputError
from fastqt.runs.checkpoint import replacing
from fastqt.runs.model import SentenceEncoder
from fastqt.text import read_blocks


def embed_file(
    encoder: SentenceEncoder, source: str, out: str | Path, *, normalize: bool = True
) -> tuple[int, int]:
    """Writes the vector of each sentence of a text file to an .npy file, in order, in constant memory.

    Args:
        encoder: the model.
        source: see `fastqt.text.read_blocks`; blank lines have no row.
        out: an .npy file, float32; it is there whole or not at all.
        normalize: scale both halves of a vector to norm 1.

    Returns:
        The matrix's shape.

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
            # numpy leaves room in the header for the number of rows to grow.
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
