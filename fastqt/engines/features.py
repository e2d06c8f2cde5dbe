"""The features of problems: a problem says which of them it needs, and an engine which of them it takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from fastqt.problem import ClipProblem, Problem, ThreeBlockProblem

# What is done in another way for an engine that does not take it, so that no problem needs it.
MIXED = (
    "mixed row negatives"  # the engine makes them of `Problem.partners`; otherwise they are written before
)
COLUMNS = "columns of several ranks"  # the engine's computation is a `ComputationOfColumns`

MULTIPLES = "sums of several multiples of scores"  # otherwise each is a problem of its own
LEAVING = "cells that leave CLIP's scores"  # otherwise its directions are problems of their own
MATRYOSHKA = "matryoshka"
MATRYOSHKA_BESIDE_ROW_NEGATIVES = "matryoshka beside row_negatives"

# The optional tensors of a problem, but for those of mixed negatives and for the second half of the groups.
_OPTIONAL = sorted(
    field.name
    for field in fields(Problem)
    if field.type == "Tensor | None" and field.name not in ("partners", "candidate_groups")
)


def _has(name: str) -> Callable[[Any], object]:
    return lambda p: getattr(p, name) is not None


# By the class of a problem, the features that it may need, and whether it does.
NEEDS: dict[type, dict[str, Callable[[Any], object]]] = {
    Problem: {
        MATRYOSHKA: lambda p: p.prefix_dims and p.row_negatives is None,
        MATRYOSHKA_BESIDE_ROW_NEGATIVES: lambda p: p.prefix_dims and p.row_negatives is not None,
        "sigmoid_loss": lambda p: p.link == "sigmoid",
        "log_sum_exp": lambda p: p.link == "log_sum_exp",
        "dense targets": lambda p: p.targets.dense is not None,
        "smoothed targets": lambda p: p.targets.background is not None,
        **{name: _has(name) for name in _OPTIONAL},
    },
    ClipProblem: {
        "rectangles of scores that several processes share": lambda p: p.pairs is not None,
        MULTIPLES: lambda p: len(p.multiples) > 1,
        LEAVING: lambda p: p.mask is not None or p.leave_apart,
    },
    ThreeBlockProblem: {},
    type(None): {},  # the machine alone is asked for
}

FEATURES = frozenset({MIXED, COLUMNS}.union(*NEEDS.values()))
