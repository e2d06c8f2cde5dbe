"""Encodes each distinct sentence once, and keeps its vector in memory."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from fastqt.errors import InputError

BATCH = 4096  # sentences in one call of the encoder
PAUSE = 5.0  # seconds between two lines that tell how far it has come

Encode = Callable[[list[str]], Any]  # from n sentences to an array (n, d)


class Vectors:
    """The vectors of n distinct sentences, (n, d)."""

    def __init__(self, texts: Sequence[str], matrix: NDArray[np.float32]) -> None:
        self.texts, self.matrix = texts, matrix
        self._row = {text: row for row, text in enumerate(texts)}

    def __call__(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Looks up sentences, which must all be known; returns their vectors (n, d)."""
        return self.matrix[[self._row[text] for text in texts]]


def embed(encode: Encode, texts: Iterable[str], *, progress: bool = True) -> Vectors:
    """Encodes each distinct sentence once, in batches of sentences of similar length.

    `encode` maps a list of n sentences to finite vectors (n, d). The progress is a bar on a terminal, and
    lines on standard error where it is none.
    """
    new = sorted(dict.fromkeys(texts), key=len)
    bar = tqdm(
        total=len(new), desc="encode", unit="sent", unit_scale=True, disable=None if progress else True
    )
    parts: list[NDArray[np.float32]] = []
    told = time.monotonic()
    with bar:
        for begin in range(0, len(new), BATCH):
            batch = new[begin : begin + BATCH]
            parts.append(_checked(encode(batch), len(batch)))
            bar.update(len(batch))
            done = begin + len(batch)
            if progress and (done == len(new) or time.monotonic() - told > PAUSE):
                told = time.monotonic()
                say(f"encode: {done:,} of {len(new):,} sentences")

    if len(widths := sorted({part.shape[1] for part in parts})) > 1:
        raise InputError(f"encode: want vectors of one width, got {', '.join(map(str, widths))}")
    return Vectors(new, np.concatenate(parts))


def say(text: str) -> None:
    """Prints a line of progress on standard error, unless that is a terminal, which has a bar."""
    if not sys.stderr.isatty():
        with contextlib.suppress(OSError):  # an evaluation does not end because nobody reads it
            print(text, file=sys.stderr, flush=True)


def _checked(array: Any, rows: int) -> NDArray[np.float32]:
    vectors = np.asarray(array, dtype=np.float32)
    if vectors.ndim != 2 or len(vectors) != rows:
        raise InputError(f"encode: want vectors ({rows}, d) for {rows} sentences, got {vectors.shape}")
    if not np.isfinite(vectors).all():
        raise InputError("encode: want finite vectors, got NaN or infinity")
    return vectors
