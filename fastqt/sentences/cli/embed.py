"""fastqt embed: the vectors of sentences."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from fastqt.sentences.cli.declared import add_options
from fastqt.sentences.cli.inference import add_inference, load
from fastqt.sentences.cli.kinds import add_device, path
from fastqt.sentences.options.inference import EmbedOptions, Side

if TYPE_CHECKING:
    from fastqt.nn.gloss_inference import Inference


def add_parser(commands: Any) -> None:
    """Adds the command's options to the subparsers of `fastqt`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "embed",
        help="turn sentences into vectors",
        description="Every line of INPUT gets a row, so that rows and lines agree; a blank line gets zeros.",
    )
    parser.add_argument("model", type=path, metavar="MODEL", help="a directory that train wrote")
    parser.add_argument(
        "input", type=path, metavar="INPUT", help="text, one sentence per line; - is standard input"
    )
    parser.add_argument(
        "--out",
        required=True,
        type=path,
        metavar="X.npy",
        help="file to write: float32, one row per line of INPUT",
    )
    add_options(parser, EmbedOptions)
    add_inference(parser)
    add_device(parser)


def run(
    model: str, input: str, out: str, raw: bool, side: Side, device: str, inference: Inference | None
) -> int:
    """Runs the command. For the arguments see `add_parser`; returns the exit status."""
    from fastqt.sentences.inference.embed import write_vectors

    encoder = load(model, device, inference)
    rows, width = write_vectors(encoder, input, out, normalize=not raw, side=side)
    print(f"{out}: {rows} x {width} float32")
    return 0
