"""fastqt compile: the GPU kernels of a training, compiled before its first step."""

from __future__ import annotations

import argparse
import ast
from typing import Any

from fastqt.errors import InputError
from fastqt.options import Target
from fastqt.sentences.cli.kinds import integer

# The losses of two matrices, and the numbers that a training learns or has to give.
LOSSES: dict[str, dict[str, float]] = {
    "contrastive": {},
    "sigmoid": {},
    "info_nce": {},
    "simcse": {},
    "mixcse": {},
    "clip": {"scale": 14.3},
    "siglip": {"scale": 10.0, "bias": -10.0},
}
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
    options = dict(map(_parsed, option))

    import torch

    from fastqt import functional, losses
    from fastqt.compiling import warm_up

    function = getattr(losses, f"{loss}_loss", None) or getattr(functional, f"{loss}_loss")
    learnt = {name: torch.tensor(x, device="cpu", requires_grad=True) for name, x in LOSSES[loss].items()}
    for N in rows:
        try:
            compiled = warm_up(
                function,
                (N, width),
                (columns or N, width),
                dtype=getattr(torch, dtype),
                target=target,
                workers=workers,
                **{**learnt, **options},
            )
        except (RuntimeError, TypeError, ValueError) as error:
            raise InputError(str(error)) from error
        print(f"{N} rows: {compiled}", flush=True)
    return 0


def _parsed(text: str) -> tuple[str, Any]:
    """The name and the value of an option; a value that is no Python literal is a text."""
    name, equals, value = text.partition("=")
    if not (name.isidentifier() and equals):
        raise InputError(f"--option: want NAME=VALUE, got {text!r}")
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return name, value
