"""fastqt index: an index of a corpus."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from fastqt.sentences.cli.declared import add_options
from fastqt.sentences.cli.inference import add_inference, load
from fastqt.sentences.cli.kinds import add_device, path
from fastqt.sentences.options.inference import IndexOptions

if TYPE_CHECKING:
    from fastqt.nn.gloss_inference import Inference


def add_parser(commands: Any) -> None:
    """Adds the command's options to the subparsers of `fastqt`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "index",
        help="make an index of a corpus, for searches in milliseconds",
        description="The index holds the sentences too. Its recall is measured against an exact search.",
    )
    parser.add_argument("model", type=path, metavar="MODEL", help="a directory that train wrote")
    parser.add_argument(
        "corpus", nargs="+", type=path, metavar="CORPUS", help="text files; - is standard input"
    )
    parser.add_argument("--out", required=True, type=path, metavar="X.index", help="file to write")
    add_options(parser, IndexOptions)
    add_inference(parser)
    add_device(parser)


def run(
    model: str, corpus: list[str], out: str, device: str, inference: Inference | None, **options: Any
) -> int:
    """Runs the command. For the arguments see `add_parser`; returns the exit status."""
    from fastqt.sentences.inference.index import build_index

    chosen = IndexOptions(**options)
    index = build_index(load(model, device, inference, with_identity=True), corpus, out, chosen)
    print(f"{out}: {index}")
    return 0
