"""Encodes each distinct sentence once, and keeps its vector in memory and, if wanted, on disk."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from fastqt.errors import InputError
from fastqt.runs.checkpoint import replacing, write_text

BATCH = 4096  # sentences in one call of the encoder

Encode = Callable[[list[str]], Any]  # from n sentences to an array (n, d)


class Cache(NamedTuple):
    """Where vectors are kept on disk: vectors in DIRECTORY/KEY.npy, their sentences in DIRECTORY/KEY.json."""

    directory: Path
    key: str  # identifies the encoder: encoders with different vectors need different keys


class Vectors:
    """The vectors of distinct sentences.

    Args:
        texts: n distinct sentences.
        matrix: (n, d) their vectors.
    """

    def __init__(self, texts: Sequence[str], matrix: NDArray[np.float32]) -> None:
        self.texts, self.matrix = texts, matrix
        self._row = {text: row for row, text in enumerate(texts)}

    def __call__(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Looks up sentences, which must all be known; returns their vectors (n, d)."""
        return self.matrix[[self._row[text] for text in texts]]


def embed(
    encode: Encode, texts: Iterable[str], *, cache: Cache | None = None, progress: bool = True
) -> Vectors:
    """Encodes each distinct sentence once, in batches of sentences of similar length.

    Args:
        encode: a function from a list of n sentences to an array (n, d).
        texts: sentences, which may repeat.
        cache: vectors that it holds are read from it, and new ones are added.
        progress: show a bar on a terminal.

    Returns:
        The vectors of all sentences.

    Raises:
        InputError: `encode` returned an array of another shape or with NaN or infinity, or the cache is
            damaged.
    """
    wanted = dict.fromkeys(texts)
    known = Vectors([], np.zeros((0, 0), dtype=np.float32)) if cache is None else _load(cache)
    known_texts = set(known.texts)
    new = sorted((text for text in wanted if text not in known_texts), key=len)
    if not new:
        return known
    bar = tqdm(
        total=len(new), desc="encode", unit="sent", unit_scale=True, disable=None if progress else True
    )
    parts: list[NDArray[np.float32]] = [known.matrix] if len(known.texts) else []
    with bar:
        for begin in range(0, len(new), BATCH):
            batch = new[begin : begin + BATCH]
            parts.append(_checked(encode(batch), len(batch)))
            bar.update(len(batch))
    vectors = Vectors([*known.texts, *new], np.concatenate(parts))
    if cache is not None:
        _save(cache, vectors)
    return vectors


def _checked(array: Any, rows: int) -> NDArray[np.float32]:
    vectors = np.asarray(array, dtype=np.float32)
    if vectors.ndim != 2 or len(vectors) != rows:
        raise InputError(f"encode: wanted vectors ({rows}, d) for {rows} sentences, got {vectors.shape}")
    if not np.isfinite(vectors).all():
        raise InputError("encode: wanted finite vectors, got NaN or infinity")
    return vectors


def _load(cache: Cache) -> Vectors:
    matrix, texts = (cache.directory / f"{cache.key}.{suffix}" for suffix in ("npy", "json"))
    if not texts.exists():
        return Vectors([], np.zeros((0, 0), dtype=np.float32))
    try:
        sentences = json.loads(texts.read_text(encoding="utf-8"))
        # Rows are only added, and the matrix is written before the sentences. If a run was killed between the
        # two writes, the matrix has more rows than there are sentences, and these are ignored.
        return Vectors(sentences, np.load(matrix, allow_pickle=False)[: len(sentences)])
    except (OSError, ValueError) as error:
        raise InputError(f"{texts} and {matrix.name} are damaged, remove them: {error}") from error


def _save(cache: Cache, vectors: Vectors) -> None:
    cache.directory.mkdir(parents=True, exist_ok=True)
    with replacing(cache.directory / f"{cache.key}.npy") as partial, partial.open("wb") as file:
        np.save(file, vectors.matrix)
    write_text(cache.directory / f"{cache.key}.json", json.dumps(vectors.texts, ensure_ascii=False))
