"""fastqt expand: the words of pre-trained vectors for a model."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fastqt.sentences.cli.kinds import path


def add_parser(commands: Any) -> None:
    """Adds the command's options to the subparsers of `fastqt`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "expand", help="add the words of pre-trained vectors to a model"
    )
    parser.add_argument("model", type=path, metavar="MODEL", help="a directory that train wrote")
    parser.add_argument(
        "vectors",
        type=path,
        metavar="VECTORS",
        help="a text file of word vectors, see --vectors of train",
    )
    parser.add_argument("--out", required=True, type=path, metavar="DIR", help="directory for the new model")


def run(model: str, vectors: str, out: str) -> int:
    """Runs the command. For the arguments see `add_parser`; returns the exit status."""
    from fastqt.sentences.inference.expand import add_words, check_holds_no_model
    from fastqt.sentences.text.vectors import read_vectors

    check_holds_no_model(Path(out))  # before the vectors are read
    words, table = read_vectors(vectors)
    print(f"{out}: {add_words(model, words, table, out)} words added")
    return 0
