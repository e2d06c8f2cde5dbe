"""Encodes each distinct sentence once, and keeps its vector in memory and, if wanted, on disk."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from fastqt.errors import InputError
from fastqt.sentences.errors import only_a_report
from fastqt.sentences.json_text import parse, to_json
from fastqt.sentences.runs.tensor_files import open_tensors, save_tensors

BATCH = 4096  # sentences in one call of the encoder

PAUSE = 5.0  # seconds between two lines that tell how far it has come

Encode = Callable[[list[str]], Any]  # from n sentences to an array (n, d)


class Cache(NamedTuple):
    """Where vectors are kept on disk: DIRECTORY/KEY.safetensors, one file, so that vectors and sentences fit.

    Example:
        >>> from pathlib import Path
        >>> from fastqt.sentences.evaluation import Cache
        >>> cache = Cache(Path("cache"), "my-model-1")  # an argument of `evaluate`
        >>> cache.key
        'my-model-1'
    """

    directory: Path
    key: str  # identifies the encoder: encoders with different vectors need different keys


class Vectors:
    """The vectors of n distinct sentences, (n, d)."""

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

    `encode` maps a list of n sentences to finite vectors (n, d). Vectors that the cache holds are read from
    it, and new ones are added. The progress is a bar on a terminal, and lines on standard error where it is
    none.
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
        source = "encode" if cache is None else f"encode or {_path(cache)}"
        raise InputError(f"{source}: want vectors of one width, got {', '.join(map(str, widths))}")

    vectors = Vectors([*known.texts, *new], np.concatenate(parts))
    if cache is not None:
        with only_a_report(f"the cache {_path(cache)}"):
            _save(cache, vectors)
    return vectors


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


def _path(cache: Cache) -> Path:
    return cache.directory / f"{cache.key}.safetensors"


def _load(cache: Cache) -> Vectors:
    path = _path(cache)
    if not path.exists():
        return Vectors([], np.zeros((0, 0), dtype=np.float32))
    try:
        with open_tensors(path) as file:
            if set(file.keys()) != {"sentences", "vectors"}:
                raise InputError(f"{path}: want the tensors sentences and vectors, got others")
            sentences, matrix = (file.get_tensor(name).numpy() for name in ("sentences", "vectors"))
        texts = parse(sentences.tobytes(), path, list)
        fits = matrix.ndim == 2 and matrix.dtype == np.float32 and len(matrix) == len(texts)
        if not fits or not all(isinstance(text, str) for text in texts):
            raise InputError(f"{path}: sentences: want a text for each of {len(matrix)} vectors")
        if not np.isfinite(matrix).all():
            raise InputError(f"{path}: vectors: want finite numbers, got NaN or infinity")
    except InputError as error:
        raise InputError(f"{error} (remove this file; its vectors will be made again)") from error
    return Vectors(texts, matrix)


def _save(cache: Cache, vectors: Vectors) -> None:
    cache.directory.mkdir(parents=True, exist_ok=True)
    sentences = torch.frombuffer(bytearray(to_json(vectors.texts).encode()), dtype=torch.uint8)
    save_tensors(_path(cache), {"sentences": sentences, "vectors": torch.from_numpy(vectors.matrix)})
