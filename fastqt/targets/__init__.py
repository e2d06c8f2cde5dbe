"""Targets: linear operators that say which candidates each query should match.

A target matrix T of shape (N, M) is never formed. `Targets.rows` lowers an operator to compressed sparse
rows, which take O(number of targets) memory and are all that the losses read.
"""

from fastqt.targets.base import IGNORE_INDEX, ShardRows, TargetRows, Targets
from fastqt.targets.operators import (
    Bags,
    ClassIndices,
    Dense,
    Diagonal,
    NoTargets,
    Pairs,
    Rolled,
    Smoothed,
    TargetsLike,
    as_targets,
    given_or_window,
    smoothed,
)
from fastqt.targets.sparse import Sparse
from fastqt.targets.window import Window

__all__ = [
    "IGNORE_INDEX",
    "Bags",
    "ClassIndices",
    "Dense",
    "Diagonal",
    "NoTargets",
    "Pairs",
    "Rolled",
    "ShardRows",
    "Smoothed",
    "Sparse",
    "TargetRows",
    "Targets",
    "TargetsLike",
    "Window",
    "as_targets",
    "given_or_window",
    "smoothed",
]
