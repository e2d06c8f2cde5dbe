"""fastqt export: a trained model as files that other libraries load."""

from __future__ import annotations

import argparse
from typing import Any

from fastqt.sentences.cli.declared import add_options
from fastqt.sentences.cli.kinds import path
from fastqt.sentences.options.inference import ExportOptions


def add_parser(commands: Any) -> None:
    """Adds the command's options to the subparsers of `fastqt`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "export",
        help="write a model for sentence-transformers, or as ONNX",
        description="Writes the encoder of a trained model, its vocabulary and a model card. The vectors are "
        "those of fastqt embed.",
    )
    parser.add_argument("model", type=path, metavar="MODEL", help="a directory that train wrote")
    parser.add_argument("--out", required=True, type=path, metavar="DIR", help="directory to write")
    add_options(parser, ExportOptions)


def run(model: str, format: str, out: str, raw: bool, overwrite: bool) -> int:
    """Runs the command. For the arguments see `add_parser`; returns the exit status."""
    from fastqt.sentences.inference.export import export_run

    width = export_run(model, out, format, normalize=not raw, overwrite=overwrite)
    print(f"{out}: {format}, vectors of width {width}")
    return 0
