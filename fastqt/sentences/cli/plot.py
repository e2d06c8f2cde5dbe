"""fastqt plot: the figures of trainings."""

from __future__ import annotations

import argparse
from typing import Any

from fastqt.sentences.cli.kinds import path


def add_parser(commands: Any) -> None:
    """Adds the command's options to the subparsers of `fastqt`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "plot", help="draw the training curves and the results of runs"
    )
    parser.add_argument("runs", nargs="+", type=path, metavar="DIR", help="directories that train wrote")
    parser.add_argument(
        "--out", type=path, metavar="DIR", help="directory for the figures (default: the first run)"
    )


def run(runs: list[str], out: str | None) -> int:
    """Runs the command. For the arguments see `add_parser`; returns the exit status."""
    from fastqt.sentences.tools.plot import draw_figures

    for figure in draw_figures(runs, out or runs[0]):
        print(figure)
    return 0
