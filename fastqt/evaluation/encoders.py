"""From what a command line names to an encoder, and to the key under which its vectors are kept."""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path
from typing import NamedTuple

from fastqt.errors import InputError
from fastqt.evaluation.baselines import SIF, WordVectors, random_encoder
from fastqt.evaluation.vectors import Encode
from fastqt.runs.checkpoint import CONFIG, MODEL, VOCABULARY
from fastqt.runs.model import SentenceEncoder

READ_BYTES = 1 << 20


class Named(NamedTuple):
    """An encoder and a digest of all that its vectors depend on."""

    encode: Encode
    key: str


def load_encoder(name: str, *, device: str = "auto", raw: bool = False, seed: int = 0) -> Named:
    """Makes the encoder that a name stands for.

    Args:
        name: a directory that `fastqt train` wrote, `random:DIR` (its model with fresh weights),
            `word-vectors:FILE`, `sif:FILE` or `sif:FILE,COUNTS`.
        device: where a model computes.
        raw: do not scale the halves of a model's vectors to norm 1.
        seed: of the fresh weights.

    Raises:
        InputError: a file that is missing or damaged, or `raw` with word vectors.
    """
    kind, colon, rest = name.partition(":")
    if colon and kind in ("word-vectors", "sif"):
        if raw:
            raise InputError(f"raw: wanted a trained model, got {name}")
        if kind == "word-vectors":
            return Named(WordVectors.load(rest), _digest(kind, rest))
        files = rest.split(",")
        if len(files) > 2:
            raise InputError(f"wanted sif:FILE or sif:FILE,COUNTS, got {name}")
        return Named(SIF.load(*files), _digest(kind, *files))
    fresh = bool(colon) and kind == "random"
    directory = rest if fresh else name
    encoder = (
        random_encoder(directory, seed=seed, device=device)
        if fresh
        else SentenceEncoder.load(directory, device)
    )
    files = [f"{directory}/{file}" for file in (CONFIG, VOCABULARY, *(() if fresh else (MODEL,)))]
    what = f"random {seed}" if fresh else "model"
    return Named(partial(encoder.encode, normalize=not raw), _digest(f"{what} {raw}", *files))


def _digest(kind: str, *files: str) -> str:
    digest = hashlib.sha256(kind.encode())
    for path in files:
        with Path(path).open("rb") as file:
            while block := file.read(READ_BYTES):
                digest.update(block)
    return digest.hexdigest()
