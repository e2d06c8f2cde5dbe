"""fastqt mine: hard negatives from a corpus for pairs of texts."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from fastqt.sentences.cli.declared import add_options
from fastqt.sentences.cli.inference import add_inference
from fastqt.sentences.cli.kinds import add_device, path
from fastqt.sentences.options.inference import MineOptions

if TYPE_CHECKING:
    from fastqt.nn.gloss_inference import Inference


def add_parser(commands: Any) -> None:
    """Adds the command's options to the subparsers of `fastqt`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "mine",
        help="find hard negatives for pairs of texts, to train on",
        description="Each line of PAIRS is a query, a tab and its positive. Negatives are near to the query "
        "among the positives of other queries and the sentences of --corpus. What is written is read by "
        "train --model pairs and by train --model simcse.",
    )
    parser.add_argument("model", type=path, metavar="MODEL", help="a directory that train wrote")
    parser.add_argument(
        "pairs", nargs="+", type=path, metavar="PAIRS", help=".tsv files; - is standard input"
    )
    parser.add_argument("--out", required=True, type=path, metavar="X.tsv", help="file to write")
    parser.add_argument(
        "--corpus", nargs="+", default=[], type=path, metavar="FILE", help="text files of further candidates"
    )
    parser.add_argument(
        "--format",
        default="triplets",
        choices=("triplets", "tuples"),
        help="a row for each negative, or for each pair that has all of its negatives (default: triplets)",
    )

    add_options(parser, MineOptions)
    add_inference(parser)
    add_device(parser)


def run(
    model: str,
    pairs: list[str],
    out: str,
    corpus: list[str],
    format: Any,
    device: str,
    inference: Inference | None,
    **options: Any,
) -> int:
    """Runs the command. For the arguments see `add_parser`; returns the exit status."""
    from fastqt.sentences.inference.encoder import SentenceEncoder
    from fastqt.sentences.inference.latents import set_inference
    from fastqt.sentences.inference.mine_file import mine_pairs

    chosen = MineOptions(**options)
    encoder = set_inference(SentenceEncoder.load(model, device), inference)
    print(f"{out}: {mine_pairs(encoder, pairs, corpus, out, chosen, format=format)}")
    return 0
