"""The options of GLOSS's inference, which all commands have that encode sentences."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fastqt.sentences.cli.declared import add_options
from fastqt.sentences.options.inference import InferenceOptions
from fastqt.sentences.options.option import options_of

if TYPE_CHECKING:
    from fastqt.nn.gloss_inference import Inference
    from fastqt.sentences.inference.encoder import SentenceEncoder

INFERENCE = tuple(options_of(InferenceOptions))


def add_inference(parser: argparse.ArgumentParser) -> None:
    """Adds the options of GLOSS's inference."""
    add_options(parser, InferenceOptions)


def take_inference(options: dict[str, Any]) -> Inference | None:
    """Removes the options of `add_inference` from a command's options, and returns them as one value."""
    from fastqt.sentences.inference.latents import chosen_inference

    return chosen_inference(**asdict(InferenceOptions(**{name: options.pop(name) for name in INFERENCE})))


def load(
    model: str, device: str, inference: Inference | None, *, with_identity: bool = False
) -> SentenceEncoder:
    """A trained model, which infers as the command line says if it is a GLOSS model."""
    from fastqt.sentences.inference.encoder import SentenceEncoder
    from fastqt.sentences.inference.latents import set_inference

    return set_inference(SentenceEncoder.load(model, device, with_identity=with_identity), inference)
