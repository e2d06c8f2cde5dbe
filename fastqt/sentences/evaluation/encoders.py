"""Loads the encoder that a command line names, with what identifies it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import NamedTuple

from fastqt.errors import InputError
from fastqt.nn.gloss_inference import Inference
from fastqt.options import Device
from fastqt.sentences.evaluation.baselines import SIF, WordVectors, random_encoder
from fastqt.sentences.evaluation.prompts import PromptedEncode
from fastqt.sentences.evaluation.vectors import Encode
from fastqt.sentences.inference.encoder import SentenceEncoder
from fastqt.sentences.inference.latents import set_inference
from fastqt.sentences.runs.digests import digest, joined_digest
from fastqt.sentences.text.reader import check_rereadable


class NamedEncoder(NamedTuple):
    """An encoder, and what identifies it: a digest of everything that its vectors depend on."""

    encode: Encode
    identity: str
    of_run: SentenceEncoder | None = None  # the model, if it is one that `fastqt train` wrote


def load_encoder(
    name: str,
    *,
    device: Device = "auto",
    raw: bool = False,
    seed: int = 0,
    inference: Inference | None = None,
) -> NamedEncoder:
    """Loads an encoder by its name.

    Args:
        name: a directory that `fastqt train` wrote, `random:DIR` (that model with random weights),
            `word-vectors:FILE` or `sif:FILE,COUNTS`.
        device: "auto", "cpu" or "cuda", for a trained model.
        raw: do not scale the vectors of a model, or their halves, to norm 1.
        seed: seed of the random weights.
        inference: how a GLOSS model finds latent vectors; None for its default.

    Returns:
        The encoder, a function from a list of n sentences to (n, d), and its identity.

    Raises:
        InputError: a file is missing or damaged, `raw` is used with word vectors, or `inference` with another
            model than GLOSS.

    Example:
        >>> from fastqt.sentences.evaluation import load_encoder
        >>> encode = load_encoder("run").encode  # a directory that `fastqt train` wrote
        >>> encode(["She closed the door."]).shape
        (1, 16)
        >>> load_encoder("word-vectors:vectors.txt").encode(["She closed the door."]).shape
        (1, 2)
    """
    kind, colon, rest = name.partition(":")
    if colon and kind in ("word-vectors", "sif"):
        for option, is_given in (("raw", raw), ("inference", inference is not None)):
            if is_given:
                raise InputError(f"{option}: want a trained model, got {name}")
        files = [rest] if kind == "word-vectors" else rest.split(",")
        check_rereadable("model", files)  # for the digest they are read again
        if kind == "word-vectors":
            return NamedEncoder(WordVectors.load(rest), _digest(kind, rest))
        if len(files) != 2:
            raise InputError(f"model: want sif:FILE,COUNTS, got {name}")
        return NamedEncoder(SIF.load(*files), _digest(kind, *files))

    if not 0 <= seed < 2**32:
        raise InputError(f"seed: want 0 to {2**32 - 1}, got {seed}")
    is_random = bool(colon) and kind == "random"
    directory = rest if is_random else name

    encoder = (
        random_encoder(directory, seed=seed, device=device)
        if is_random
        else SentenceEncoder.load(directory, device, with_identity=True)
    )
    set_inference(encoder, inference)
    encode: Encode = partial(encoder.encode, normalize=not raw)
    if any(encoder.prompts):
        encode = PromptedEncode(encoder, normalize=not raw)
    description = f"{f'random {seed}' if is_random else 'model'} {raw}"
    return NamedEncoder(encode, joined_digest(description, encoder.identity or ""), encoder)


def _digest(kind: str, *files: str) -> str:
    """The digest of files of word vectors and of word counts."""
    return joined_digest(kind, *(digest(Path(file)) for file in files))
