"""Chooses how a loaded GLOSS model finds the latent vectors of sentences."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fastqt.errors import InputError
from fastqt.nn import Gloss
from fastqt.nn.gloss_inference import Inference
from fastqt.sentences.inference.encoder import SentenceEncoder
from fastqt.sentences.runs.digests import joined_digest


def chosen_inference(
    inference: str | None, inference_steps: int | None, inference_learning_rate: float | None
) -> Inference | None:
    """The options of a command line as an `Inference`; None if none is given.

    `inference` is "safeguarded", the default, or "specified": steps are taken as they are. There are 250
    steps by default, of size 1.
    """
    options = {"steps": inference_steps, "learning_rate": inference_learning_rate}
    changes: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if inference is None and not changes:
        return None
    try:
        return replace(Inference(safeguard=inference != "specified"), **changes)
    except ValueError as error:
        raise InputError(f"inference_{error}") from None


def set_inference(encoder: SentenceEncoder, how: Inference | None) -> SentenceEncoder:
    """Has an encoder find latent vectors as `how` says, and its identity tell so; None changes nothing."""
    if how is None:
        return encoder
    if not isinstance(encoder.model, Gloss):
        raise InputError(
            "inference: want it with a model trained with --model gloss-bow or gloss-pos alone, got a "
            f"{type(encoder.model).__name__}"
        )
    encoder.model.inference = how
    if encoder.identity is not None and how != Inference():
        encoder.identity = joined_digest(encoder.identity, str(how))
    return encoder
