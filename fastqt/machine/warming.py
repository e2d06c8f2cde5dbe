"""Compiles the GPU kernels of losses that are named on a command line."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import Any

from fastqt.errors import InputError
from fastqt.options import Target

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


def compile_loss(
    loss: str,
    rows: Sequence[int],
    columns: int | None,
    width: int,
    dtype: str,
    *,
    target: Target | None = None,
    workers: int | None = None,
    options: Sequence[str] = (),
) -> Iterator[str]:
    """Compiles the kernels of a loss for batches of these sizes, and says of each what was compiled.

    Args:
        loss: a name of LOSSES.
        rows: sizes of batches, of (rows, width) against (columns, width); columns are by default the rows.
        dtype, target, workers: as of `fastqt.compiling.warm_up`; dtype is a name such as "bfloat16".
        options: arguments of the loss, each as NAME=VALUE.

    Raises:
        InputError: an option is none of the loss, or its kernels cannot be compiled.
    """
    chosen = dict(map(_parsed, options))

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
                **{**learnt, **chosen},
            )
        except (RuntimeError, TypeError, ValueError) as error:
            raise InputError(str(error)) from error
        yield f"{N} rows: {compiled}"


def _parsed(text: str) -> tuple[str, Any]:
    """The name and the value of an option; a value that is no Python literal is a text."""
    name, equals, value = text.partition("=")
    if not (name.isidentifier() and equals):
        raise InputError(f"--option: want NAME=VALUE, got {text!r}")
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return name, value
