"""Launches of the kernel of the scores, one function for each of its epilogues."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fastqt.kernels.launch import Config, compute_dtype, on_device, precision, programs
from fastqt.kernels.scores.epilogues import EXP, EXP_ROWS_AND_COLUMNS, ROW_MAX, SIGMOID
from fastqt.kernels.scores.mainloop import scores_kernel


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


def row_tiles(rows: int, config: Config) -> int:
    return triton.cdiv(rows, config.rows)


def column_tiles(columns: int, config: Config) -> int:
    return triton.cdiv(columns, config.columns)


def exp_scores(
    tile: Tile,
    queries: Tensor,  # (N, D)
    scale: Tensor,  # () float32
    row_shift_log2: Tensor,  # (N,) float32
    config: Config,
    *,
    exponentials: Tensor | None = None,  # (rows, columns), rows contiguous
    factors: Tensor | None = None,  # (N,) float32
    tile_row_sums: Tensor | None = None,  # (column_tiles, rows) float32
    tile_column_sums: Tensor | None = None,  # (row_tiles, columns) float32, with `factors`
    shift_overflowed: tuple[Tensor, Tensor] | None = None,  # (N,) and () int32: only these rows, if any
) -> None:
    """Writes E = exp(score - shift of its row), and its sums.

    `tile_row_sums` are those of E. `exponentials` is E times `factors`, and `tile_column_sums` are its sums.
    """
    operands = {
        "row_shift_log2": row_shift_log2,
        "row_factors": None if exponentials is None else factors,
        "out": exponentials,
        "tile_row_sums": tile_row_sums,
        "tile_column_sums": tile_column_sums,
    }
    _launch(tile, queries, scale, config, EXP, operands, shift_overflowed)


def sigmoid_scores(
    tile: Tile,
    queries: Tensor,  # (N, D)
    scale: Tensor,  # () float32
    factors: Tensor,  # (N,) float32
    config: Config,
    *,
    probabilities: Tensor | None = None,  # (rows, columns), rows contiguous
    tile_row_sums: Tensor | None = None,  # (column_tiles, rows) float32
    tile_column_sums: Tensor | None = None,  # (row_tiles, columns) float32
) -> None:
    """Writes sums of log(1 + exp(score)) into `tile_row_sums`, sigmoids times `factors` into `probabilities`.

    `tile_column_sums` are the sums of the latter.
    """
    operands = {
        "row_factors": None if probabilities is None else factors,
        "out": probabilities,
        "tile_row_sums": tile_row_sums,
        "tile_column_sums": tile_column_sums,
    }
    _launch(tile, queries, scale, config, SIGMOID, operands)


def row_and_column_scores(
    tile: Tile,
    queries: Tensor,  # (N, D)
    scale: Tensor,  # () float32
    row_shift_log2: tuple[Tensor, Tensor],  # (N,) and (columns,) float32
    config: Config,
    *,
    factors: tuple[Tensor, Tensor] | None = None,  # (N,) and (columns,) float32
    total: Tensor | None = None,  # (rows, columns), rows contiguous
    tile_row_sums: Tensor | None = None,  # (column_tiles, rows) float32
    tile_column_sums: Tensor | None = None,  # (row_tiles, columns) float32
) -> None:
    """Writes what becomes of exp(score - shift of its row) and exp(score - shift of its column).

    `tile_row_sums` are those of the first, `tile_column_sums` those of the second. `total` is each cell's
    first and second, each times its factor, added up.
    """
    of_rows, of_columns = factors or (None, None)
    operands = {
        "row_shift_log2": row_shift_log2[0],
        "column_shift_log2": row_shift_log2[1],
        "row_factors": None if total is None else of_rows,
        "column_factors": None if total is None else of_columns,
        "out": total,
        "tile_row_sums": tile_row_sums,
        "tile_column_sums": tile_column_sums,
    }
    _launch(tile, queries, scale, config, EXP_ROWS_AND_COLUMNS, operands)


def max_scores(
    tile: Tile,
    queries: Tensor,  # (N, D)
    scale: Tensor,  # () float32
    tile_row_sums: Tensor,  # (column_tiles, rows) float32
    config: Config,
    *,
    shift_overflowed: tuple[Tensor, Tensor] | None = None,  # (N,) and () int32: only these rows, if any
) -> None:
    """Writes row maxima of the scores to base 2; -inf where all cells are excluded."""
    _launch(tile, queries, scale, config, ROW_MAX, {"tile_row_sums": tile_row_sums}, shift_overflowed)


def _launch(
    tile: Tile,
    queries: Tensor,
    scale: Tensor,
    config: Config,
    epilogue: tl.constexpr,
    operands: dict[str, Tensor | None],  # of the epilogue, by their names in the kernel
    shift_overflowed: tuple[Tensor, Tensor] | None = None,
) -> None:
    columns, D = tile.candidates.shape
    tiles = row_tiles(tile.rows, config) * column_tiles(columns, config)
    overflowed, any_overflowed = shift_overflowed or (None, None)
    # Sixteen bytes are copied at a time where rows begin at multiples of them; else single elements,
    # with an address each, of which a program can hold only so many.
    unit = 16 // queries.element_size()
    if any(n % unit for n in (D, queries.stride(0), tile.candidates.stride(0))):
        unit = 1
    step = config.width if unit > 1 else 16
    matrices: tuple[Tensor | TensorDescriptor, ...] = queries, tile.candidates
    descriptors = config.descriptors and unit > 1 and all(map(_has_descriptor, (queries, tile.candidates)))
    if descriptors:
        matrices = (
            TensorDescriptor.from_tensor(queries, [config.rows, step]),
            TensorDescriptor.from_tensor(tile.candidates, [config.columns, step]),
        )
    out = operands.get("out")
    with on_device(queries):
        scores_kernel[(tiles if shift_overflowed is None else programs(queries, tiles),)](
            *(*matrices, scale, tile.rows, columns, D // unit, tile.first_row, tile.first_column),
            *(queries.stride(0) // unit, queries.stride(1)),
            *(tile.candidates.stride(0) // unit, tile.candidates.stride(1)),
            0 if out is None else out.stride(0),
            *((0, 0) if tile.mask is None else tile.mask.stride()),
            EPILOGUE=epilogue.value,
            EXCLUDE_DIAGONAL=tile.exclude_diagonal,
            EVEN_M=columns % config.columns == 0,
            EVEN_D=D % step == 0,
            DESCRIPTORS=descriptors,
            UNIT=unit,
            COMPUTE=compute_dtype(queries.dtype),
            PRECISION=precision(queries.dtype),
            BLOCK_N=config.rows,
            BLOCK_M=config.columns,
            BLOCK_D=step,
            GROUP_N=config.group,
            bias=tile.bias,
            shift_overflowed=overflowed,
            any_overflowed=any_overflowed,
            target_starts=tile.target_starts,
            target_columns=tile.target_columns,
            lowest_targets=tile.lowest_targets,
            highest_targets=tile.highest_targets,
            query_groups=tile.query_groups,
            candidate_groups=tile.candidate_groups,
            mask=tile.mask,
            query_inverse_norms=tile.query_inverse_norms,
            candidate_inverse_norms=tile.candidate_inverse_norms,
            **operands,
            num_warps=config.warps,
            enable_fp_fusion=True,
            num_stages=config.stages,
        )


def _has_descriptor(x: Tensor) -> bool:
    """Whether a tensor descriptor can say where a matrix lies whose row stride is of whole 16 bytes."""
    return x.stride(1) == 1 and x.stride(0) >= x.shape[1] and x.data_ptr() % 16 == 0
