"""A part of the score matrix, as the launches of the scores' kernels take it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fastqt.kernels.launch import Config, cdiv


@dataclass(frozen=True)
class Tile:
    """A part of the score matrix, some rows against some columns, and which of its cells are excluded.

    N and M count all rows and all columns. E is 0 in excluded cells.
    """

    first_row: int
    rows: int
    candidates: Tensor  # (columns, D): those of the part's columns
    first_column: int = 0
    exclude_diagonal: bool = False
    target_starts: Tensor | None = None  # (N + 1,) int64; the three following are given with it
    target_columns: Tensor | None = None  # (targets,) int64, -1 for none
    lowest_targets: Tensor | None = None  # (N,) int32, NOWHERE without any
    highest_targets: Tensor | None = None  # (N,) int32
    query_groups: Tensor | None = None  # (N,) int32
    candidate_groups: Tensor | None = None  # (M,) int32
    mask: Tensor | None = None  # (N, M) bool
    bias: Tensor | None = None  # (columns,) float32
    query_inverse_norms: Tensor | None = None  # (N,) float32, given with the following: scores are cosines
    candidate_inverse_norms: Tensor | None = None  # (columns,) float32
    thresholds: Tensor | None = None  # (N,) float32, of similarities: those of a row above its own leave
    rounded: bool = False  # whether the queries and candidates of products in TF32 are rounded to it

    @property
    def operands(self) -> dict[str, Tensor | None]:
        """What every kernel of scores takes of it by name, but for the lists of targets."""
        names = "bias", "lowest_targets", "highest_targets", "query_groups", "candidate_groups", "mask"
        norms = "query_inverse_norms", "candidate_inverse_norms"
        return {name: getattr(self, name) for name in (*names, *norms, "thresholds")}

    @property
    def mask_strides(self) -> tuple[int, ...]:
        return (0, 0) if self.mask is None else self.mask.stride()


def row_tiles(rows: int, config: Config) -> int:
    return cdiv(rows, config.rows)


def column_tiles(columns: int, config: Config) -> int:
    return cdiv(columns, config.columns)
