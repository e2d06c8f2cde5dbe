"""fastqt neighbors: the nearest sentences of a corpus."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from fastqt.errors import InputError
from fastqt.sentences.cli.inference import add_inference, load
from fastqt.sentences.cli.kinds import add_device, add_value, integer, path

if TYPE_CHECKING:
    from fastqt.nn.gloss_inference import Inference


def add_parser(commands: Any) -> None:
    """Adds the command's options to the subparsers of `fastqt`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "neighbors",
        help="find the nearest sentences of a corpus",
        description="With --index, CORPUS may be left out. If it is given, it is compared with the index's.",
    )
    parser.add_argument("model", type=path, metavar="MODEL", help="a directory that train wrote")
    parser.add_argument(
        "corpus", nargs="*", type=path, metavar="CORPUS", help="text files; - is standard input"
    )
    parser.add_argument("--index", type=path, metavar="X.index", help="a file that index wrote")
    parser.add_argument(
        "--query", action="append", required=True, metavar="TEXT", help="a sentence; may be repeated"
    )
    add_value(parser, "-k", integer, 5, "number of sentences per query")
    add_inference(parser)
    add_device(parser)


def run(
    model: str,
    corpus: list[str],
    index: str | None,
    query: list[str],
    k: int,
    device: str,
    inference: Inference | None,
) -> int:
    """Runs the command. For the arguments see `add_parser`; returns the exit status."""
    from fastqt.sentences.inference.index import Index
    from fastqt.sentences.inference.search import nearest

    if not corpus and index is None:
        raise InputError("no CORPUS given, and no --index")
    encoder = load(model, device, inference, with_identity=index is not None)
    if index is None:
        neighbors = nearest(encoder, query, corpus, k)
    else:
        opened = Index(index)
        if corpus:
            opened.check_corpus(corpus)
        neighbors = opened.search(encoder, query, k)
    for text, answers in zip(query, neighbors, strict=True):
        print(text)
        for neighbor in answers:
            print(f"  {neighbor}")
    return 0
