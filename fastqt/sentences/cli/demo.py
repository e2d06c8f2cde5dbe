"""fastqt demo: the loss beside eager PyTorch, and what a small model learns."""

from __future__ import annotations

import argparse
from typing import Any

from fastqt.sentences.cli.kinds import add_value, integer


def add_parser(commands: Any) -> None:
    """Adds the command's options to the subparsers of `fastqt`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "demo",
        help="compare the loss with eager PyTorch, and show what a small model learns from docstrings",
    )
    add_value(parser, "--seed", integer, 0, "seed of the model's weights")


def run(seed: int) -> int:
    """Runs the command. For the arguments see `add_parser`; returns the exit status."""
    from fastqt.sentences.tools import demo

    demo.run(seed)
    return 0
