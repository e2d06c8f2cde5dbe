"""fastqt check: whether the losses are right on the devices of this machine, and how fast they are."""

from __future__ import annotations

import argparse
from typing import Any

from fastqt.sentences.cli.kinds import add_value, number, path

SECONDS = 60.0


def add_parser(commands: Any) -> None:
    """Adds the command's options to the subparsers of `fastqt`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "check",
        help="check that the losses are right on this machine's devices, and measure them",
        description="Every engine that is usable computes losses and gradients, which are compared with the "
        "formulas in float64. The exit status is 1 if something is wrong.",
    )

    parser.add_argument(
        "--device",
        nargs="+",
        default=[],
        metavar="DEVICE",
        help="cpu, cuda, cuda:1, mps, xpu and so on (default: every one there is)",
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, in a few seconds")
    add_value(parser, "--seconds", number, SECONDS, "time in all; what it does not reach is told", "X")
    parser.add_argument("--json", type=path, metavar="FILE.json", help="file to write: all results")


def run(device: list[str], quick: bool, seconds: float, json: str | None) -> int:
    """Runs the command. For the arguments see `add_parser`; returns the exit status."""
    from fastqt.machine import check
    from fastqt.sentences.json_text import to_json
    from fastqt.sentences.runs.files import check_can_be_written, check_ending, write_atomically

    if json is not None:
        check_ending(json, ".json")
        check_can_be_written(json)
    results = check.run(device, quick=quick, seconds=seconds)
    if json is not None:
        text = to_json(results, indent=1) + "\n"
        write_atomically(json, lambda path: path.write_text(text, encoding="utf-8"))
        print(f"{json}: all results")
    return 0 if results["right"] else 1
