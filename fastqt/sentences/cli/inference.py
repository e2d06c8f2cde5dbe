"""The options of GLOSS's inference, which all commands have that encode sentences."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from fastqt.sentences.cli.kinds import integer, number

if TYPE_CHECKING:
    from fastqt.nn.gloss_inference import Inference
    from fastqt.sentences.inference.encoder import SentenceEncoder

INFERENCE = ("inference", "inference_steps", "inference_learning_rate")


def add_inference(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `fastqt.sentences.inference.latents.chosen_inference`."""
    parser.add_argument(
        "--inference",
        choices=("safeguarded", "specified"),
        help="how a gloss model finds vectors: steps that overshoot are undone, or all are taken, as in "
        "the paper (default: safeguarded)",
    )
    parser.add_argument(
        "--inference-steps", type=integer, metavar="N", help="steps of gloss's inference (default: 250)"
    )
    parser.add_argument(
        "--inference-learning-rate",
        type=number,
        metavar="X",
        help="step size of gloss's inference (default: 1)",
    )


def take_inference(options: dict[str, Any]) -> Inference | None:
    """Removes the options of `add_inference` from a command's options, and returns them as one value."""
    from fastqt.sentences.inference.latents import chosen_inference

    return chosen_inference(**{name: options.pop(name) for name in INFERENCE})


def load(
    model: str, device: str, inference: Inference | None, *, with_identity: bool = False
) -> SentenceEncoder:
    """A trained model, which infers as the command line says if it is a GLOSS model."""
    from fastqt.sentences.inference.encoder import SentenceEncoder
    from fastqt.sentences.inference.latents import set_inference

    return set_inference(SentenceEncoder.load(model, device, with_identity=with_identity), inference)
