"""fastqt analogy: A is to B as C is to which sentence of a pool?"""

from __future__ import annotations

import argparse
from typing import Any

from fastqt.sentences.cli.kinds import add_device, add_value, integer, path


def add_parser(commands: Any) -> None:
    """Adds the command's options to the subparsers of `fastqt`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "analogy",
        help="answer what C is to, as A is to B, by sentences of a pool",
        description="A is to B as C is to the sentences of the pool with the highest cosine to C + B - A.",
    )
    parser.add_argument("model", type=path, metavar="MODEL", help="a directory that train wrote")
    parser.add_argument("pool", nargs="+", type=path, metavar="POOL", help="text files; - is standard input")
    for letter in "abc":
        parser.add_argument(
            f"--{letter}", required=True, metavar="TEXT", help=f"the sentence {letter.upper()}"
        )
    add_value(parser, "-k", integer, 5, "number of sentences")
    parser.add_argument(
        "--exclude", action="store_true", help="leave A, B and C out of the pool where they are in it"
    )
    add_device(parser)


def run(model: str, pool: list[str], a: str, b: str, c: str, k: int, exclude: bool, device: str) -> int:
    """Runs the command. For the arguments see `add_parser`; returns the exit status."""
    from fastqt.sentences.inference.analogy import answers
    from fastqt.sentences.inference.encoder import SentenceEncoder

    encoder = SentenceEncoder.load(model, device)
    neighbors = answers(encoder, a, b, c, pool, k, exclude=exclude)
    print(f"{a} : {b} :: {c} :")
    for neighbor in neighbors:
        print(f"  {neighbor}")
    return 0
