"""fastqt compile: the GPU kernels of a training, compiled before its first step."""

from __future__ import annotations

import argparse
from typing import Any

from fastqt.errors import InputError
from fastqt.machine.warming import LOSSES, compile_loss
from fastqt.options import Target
from fastqt.sentences.cli.kinds import integer

DTYPES = ("bfloat16", "float16", "float32")
ROWS, WIDTH = 4096, 768


def add_parser(commands: Any) -> None:
    """Adds the command's options to the subparsers of `fastqt`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "compile",
        help="compile the GPU kernels of a loss, so that the first step of a training does not",
        description="They are kept in Triton's cache, where trainings on this machine find them. With "
        "--target that takes no GPU. The scale of clip and siglip, and the latter's bias, are learnt ones.",
    )

    parser.add_argument("loss", choices=tuple(LOSSES), metavar="LOSS", help=", ".join(LOSSES))
    parser.add_argument(
        "--rows",
        nargs="+",
        type=integer,
        default=[ROWS],
        metavar="N",
        help=f"sizes of batches: the usual one and, if it is another, an epoch's last (default: {ROWS})",
    )
    parser.add_argument(
        "--columns", type=integer, metavar="M", help="candidates, if they are not as many as the rows"
    )
    parser.add_argument(
        "--width", type=integer, default=WIDTH, metavar="D", help=f"of the embeddings (default: {WIDTH})"
    )

    parser.add_argument("--dtype", default=DTYPES[0], choices=DTYPES, help="(default: bfloat16)")
    parser.add_argument(
        "--target", metavar="sm_90", help="compile for this kind of GPU: sm_80, sm_90 or sm_100"
    )
    parser.add_argument(
        "--workers", type=integer, metavar="N", help="threads (default: one for each processor)"
    )
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an argument of the loss, as diagonal=keep; may be given several times",
    )


def run(
    loss: str,
    rows: list[int],
    columns: int | None,
    width: int,
    dtype: str,
    target: Target | None,
    workers: int | None,
    option: list[str],
) -> int:
    """Runs the command. For the arguments see `add_parser`; returns the exit status."""
    for name, value in (*(("--rows", n) for n in rows), ("--columns", columns), ("--width", width)):
        if value is not None and value < 1:
            raise InputError(f"{name}: want at least 1, got {value}")
    if workers is not None and workers < 1:
        raise InputError(f"--workers: want at least 1, got {workers}")
    compiled = compile_loss(loss, rows, columns, width, dtype, target=target, workers=workers, options=option)
    for line in compiled:
        print(line, flush=True)
    return 0
