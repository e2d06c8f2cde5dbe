"""The options of GLOSS's inference, which all commands have that encode sentences."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from fastqt.sentences.cli.kinds import integer, number

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


def taken(options: dict[str, Any], names: Sequence[str] = INFERENCE) -> dict[str, Any]:
    """The options of these names, which are removed from the others."""
    return {name: options.pop(name) for name in names}
