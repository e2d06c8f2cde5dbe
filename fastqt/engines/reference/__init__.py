"""The engine "reference": every loss in plain PyTorch, on any device, in O(N * M) memory."""

from __future__ import annotations

from typing import Any

import torch

from fastqt.engines.engine import Engine
from fastqt.engines.features import COLUMNS, FEATURES, MIXED
from fastqt.engines.reference import clip
from fastqt.problem import AnyProblem, ClipProblem, Problem


def _of_kind(p: AnyProblem) -> Any:
    """The module of rectangles of CLIP's scores. Nothing else has one: autograd differentiates losses."""
    return clip if isinstance(p, ClipProblem) and p.pairs is not None else None


ENGINE = Engine(
    "reference",
    takes=FEATURES - {COLUMNS, MIXED},
    of_kind=_of_kind,
    dtype_for=lambda p, dtype: torch.promote_types(dtype, torch.float32),
    # Prefixes are normalised one by one.
    normalizes=lambda p, dtype: isinstance(p, Problem) and bool(p.prefix_dims),
    eager=True,
)
