"""fastqt interpolate: sentences between two sentences."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from fastqt.sentences.cli.inference import add_inference, load
from fastqt.sentences.cli.kinds import add_device, add_value, integer, path

if TYPE_CHECKING:
    from fastqt.nn.gloss_inference import Inference


def add_parser(commands: Any) -> None:
    """Adds the command's options to the subparsers of `fastqt`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "interpolate", help="generate sentences between two sentences, with a GLOSS model"
    )
    parser.add_argument(
        "model", type=path, metavar="MODEL", help="a directory that train --model gloss-... wrote"
    )
    parser.add_argument("--from", dest="source", required=True, metavar="TEXT", help="the first sentence")
    parser.add_argument("--to", dest="target", required=True, metavar="TEXT", help="the last sentence")
    add_value(parser, "--steps", integer, 4, "number of sentences between them", "N")
    parser.add_argument(
        "--slerp", action="store_true", help="interpolate along an arc, not along a straight line"
    )
    add_inference(parser)
    add_device(parser)


def run(
    model: str,
    source: str,
    target: str,
    steps: int,
    slerp: bool,
    device: str,
    inference: Inference | None,
) -> int:
    """Runs the command. For the arguments see `add_parser`; returns the exit status."""
    from fastqt.sentences.inference.interpolate import sentences_between

    encoder = load(model, device, inference)
    for share, text in sentences_between(encoder, source, target, steps=steps, slerp=slerp):
        print(f"{share:.2f}  {text}")
    return 0
