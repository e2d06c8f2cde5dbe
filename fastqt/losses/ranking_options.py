"""The options of multiple negatives ranking, and what they may be."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from fastqt.checks import FLOAT32_MAX, check_flag, check_number, check_option, check_scale, shown
from fastqt.guide import check_margin_of_false_negatives
from fastqt.matryoshka import Matryoshka, MatryoshkaLike, prefixes_of
from fastqt.options import (
    Backend,
    Direction,
    HardnessMode,
    MarginStrategy,
    Memory,
    PartitionMode,
    Reduction,
)
from fastqt.problem import REDUCTIONS, check_memory

DIRECTIONS: tuple[Direction, ...] = get_args(Direction)
WITHOUT_POSITIVES = ("query_to_query", "doc_to_doc")
PARTITION_MODES: tuple[str, ...] = get_args(PartitionMode)
HARDNESS_MODES: tuple[str, ...] = get_args(HardnessMode)


class Options(NamedTuple):
    """The options of the loss, whose directions are checked."""

    scale: float | Tensor
    normalize: bool
    directions: tuple[Direction, ...]
    partition_mode: PartitionMode
    hardness_mode: HardnessMode | None
    hardness_strength: float
    false_negative_margin: float | None
    false_negative_margin_strategy: MarginStrategy
    reduction: Reduction
    memory: Memory
    backend: Backend | None
    matryoshka: MatryoshkaLike | None

    @property
    def prefixes(self) -> Matryoshka | None:
        return prefixes_of(self.matryoshka)

    def check(self, queries: Tensor) -> None:
        """Raises ValueError or TypeError unless all are what they have to be."""
        check_scale(self.scale, queries.dtype)
        check_flag("normalize", self.normalize)
        check_margin_of_false_negatives(
            self.false_negative_margin, self.false_negative_margin_strategy, queries.dtype
        )
        check_hardness_mode(self.hardness_mode)
        check_hardness_strength(self.hardness_strength, queries.dtype)
        if self.hardness_mode is None and self.hardness_strength:
            raise ValueError(
                f"hardness_strength: want it with a hardness_mode alone, got {self.hardness_strength}"
            )
        self._check_raised_scale(queries.dtype)
        check_option("reduction", self.reduction, REDUCTIONS)
        check_memory(self.memory)
        prefixes_of(self.matryoshka, queries.shape[1])

    def _check_raised_scale(self, dtype: torch.dtype) -> None:
        """Raises ValueError unless embeddings of `dtype` can have the scale of scores with the strength."""
        if isinstance(self.scale, Tensor):
            return
        most = sys.float_info.max if dtype is torch.float64 else FLOAT32_MAX
        if not self.scale + self.hardness_strength <= most:
            raise ValueError(
                f"hardness_strength: want at most {most:.4g} together with the scale, which is {self.scale}, "
                f"got {self.hardness_strength}"
            )

    @property
    def hardness(self) -> str | None:
        """The mode, if it changes anything."""
        return self.hardness_mode if self.hardness_strength else None


def check_directions(directions: object) -> None:
    """Raises ValueError or TypeError unless these are directions, "query_to_doc" among them."""
    if isinstance(directions, str) or not isinstance(directions, Sequence | set | frozenset):
        advice = "; put the name into a list" if isinstance(directions, str) else ""
        raise TypeError(f"directions: want a sequence of names, got {shown(directions)}{advice}")
    for name in directions:
        check_option("directions", name, DIRECTIONS)
    if "query_to_doc" not in directions:
        raise ValueError(f"directions: want 'query_to_doc' among them, got {shown(directions)}")


def check_hardness_mode(mode: object) -> None:
    """Raises ValueError unless this is a mode or None."""
    if mode is not None:
        check_option("hardness_mode", mode, HARDNESS_MODES)


def check_hardness_strength(strength: float, dtype: torch.dtype = torch.float64) -> None:
    """Raises ValueError or TypeError unless this is a number >= 0, which embeddings of `dtype` allow."""
    check_number("hardness_strength", strength, dtype=dtype)
    if strength < 0:
        raise ValueError(f"hardness_strength: want a number >= 0, got {strength}")


def check_partition(directions: Sequence[Direction], partition_mode: PartitionMode) -> None:
    """Raises ValueError unless each softmax contains the positive."""
    check_option("partition_mode", partition_mode, PARTITION_MODES)
    without = [name for name in directions if name in WITHOUT_POSITIVES]
    if partition_mode == "per_direction" and without:
        raise ValueError(
            f"partition_mode: want 'joint' with {without[0]!r}, whose scores do not contain the positive, "
            "got 'per_direction'"
        )


def checked_directions(
    directions: Sequence[Direction], partition_mode: PartitionMode
) -> tuple[Direction, ...]:
    """The directions in a fixed order."""
    check_directions(directions)
    check_partition(directions, partition_mode)
    return tuple(name for name in DIRECTIONS if name in directions)
