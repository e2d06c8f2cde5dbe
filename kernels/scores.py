"""Tiles of the score matrix: which of its cells a product computes, and what it makes of them."""

from __future__ import annotations

from dataclasses import dataclass

import triton
from fastqt.kernels.launch import Config, compute_dtype, on_device, precision, programs
from fastqt.kernels.scores_kernel import scores_kernel
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


@dataclass(frozen=True)
class Tile:
    """Some rows against some columns of the score matrix, and which of its cells are left out of E."""

    first_row: int
    rows: int
    candidates: Tensor  # (columns, D): those columns'
    first_column: int = 0
    leave_out_diagonal: bool = False
    target_starts: Tensor | None = None  # (N + 1,) int64
    target_columns: Tensor | None = None  # (targets,) int64, -1 for none
    lowest_targets: Tensor | None = None  # (N,) int32, NOWHERE without any
    highest_targets: Tensor | None = None  # (N,) int32
    query_groups: Tensor | None = None  # (N,) int32
    candidate_groups: Tensor | None = None  # (M,) int32
    mask: Tensor | None = None  # (N, M) bool
    bias: Tensor | None = None  # (columns,) float32


def row_tiles(rows: int, config: Config) -> int:
    return triton.cdiv(rows, config.rows)


def column_tiles(columns: int, config: Config) -> int:
    return triton.cdiv(columns, config.columns)


def exp_scores(
    tile: Tile,
    queries: Tensor,  # (N, D)
    scale: Tensor,  # () float32
    row_shift_log2: Tensor,  # (N,) float32, to base 2
    config: Config,
    *,
    exponentials: Tensor | None = None,  # (rows, columns), rows contiguous
    factors: Tensor | None = None,  # (N,) float32
    tile_row_sums: Tensor | None = None,  # (column_tiles, rows) float32
    tile_column_sums: Tensor | None = None,  # (row_tiles, columns) float32, with `factors`
    shift_overflowed: tuple[Tensor, Tensor] | None = None,  # (N,) and () int32: only these rows, if any
) -> None:
    """Row sums of E by blocks of columns into `tile_row_sums`, and E, times `factors`, into `exponentials`.

    Column sums of the latter by blocks of rows go into `tile_column_sums`.
    """
    results = _Results(exponentials, tile_row_sums, tile_column_sums)
    _launch(tile, queries, scale, row_shift_log2, factors, results, shift_overflowed, config)


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
    """Sums of log(1 + exp(score)) into `tile_row_sums`, sigmoids times `factors` into `probabilities`.

    Sums are by blocks as of `exp_scores`.
    """
    results = _Results(probabilities, tile_row_sums, tile_column_sums)
    _launch(tile, queries, scale, None, factors, results, None, config, sigmoid=True)


def row_and_column_scores(
    tile: Tile,
    queries: Tensor,  # (N, D)
    scale: Tensor,  # () float32
    row_shift_log2: tuple[Tensor, Tensor],  # (N,) and (columns,) float32, to base 2
    config: Config,
    *,
    factors: tuple[Tensor, Tensor] | None = None,  # (N,) and (columns,) float32
    total: Tensor | None = None,  # (rows, columns), rows contiguous
    tile_row_sums: Tensor | None = None,  # (column_tiles, rows) float32
    tile_column_sums: Tensor | None = None,  # (row_tiles, columns) float32
) -> None:
    """Of exponentials with shifts of rows and of columns: sums of either, or the cells' two added up.

    Row sums are by blocks as of `exp_scores`, column sums by blocks of rows. `factors` are of what is
    added up into `total`.
    """
    results = _Results(total, tile_row_sums, tile_column_sums)
    of_rows, of_columns = factors or (None, None)
    both = row_shift_log2[1], of_columns
    _launch(tile, queries, scale, row_shift_log2[0], of_rows, results, None, config, of_columns=both)


def max_scores(
    tile: Tile,
    queries: Tensor,  # (N, D)
    scale: Tensor,  # () float32
    tile_row_sums: Tensor,  # (column_tiles, rows) float32
    config: Config,
    *,
    shift_overflowed: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Row maxima of the scores to base 2 by blocks of columns; -inf where all cells are left out."""
    _launch(tile, queries, scale, None, None, _Results(None, tile_row_sums), shift_overflowed, config)


@dataclass(frozen=True)
class _Results:
    stored: Tensor | None
    tile_row_sums: Tensor | None
    tile_column_sums: Tensor | None = None


def _launch(
    tile: Tile,
    queries: Tensor,
    scale: Tensor,
    row_shift_log2: Tensor | None,
    factors: Tensor | None,
    results: _Results,
    shift_overflowed: tuple[Tensor, Tensor] | None,
    config: Config,
    *,
    sigmoid: bool = False,
    of_columns: tuple[Tensor, Tensor | None] | None = None,  # references and factors
) -> None:
    columns, width = tile.candidates.shape
    tiles = row_tiles(tile.rows, config) * column_tiles(columns, config)
    stored = results.stored
    flags, any_flag = shift_overflowed or (None, None)
    column_shift_log2, column_factors = of_columns or (None, None)
    # Sixteen bytes are copied at a time where rows begin at multiples of them; else single elements,
    # with an address each, of which a program can hold only so many.
    unit = 16 // queries.element_size()
    if any(n % unit for n in (width, queries.stride(0), tile.candidates.stride(0))):
        unit = 1
    step = config.width if unit > 1 else 16
    operands: tuple[Tensor | TensorDescriptor, ...] = queries, tile.candidates
    descriptors = config.descriptors and unit > 1 and all(map(_has_descriptor, (queries, tile.candidates)))
    if descriptors:
        operands = (
            TensorDescriptor.from_tensor(queries, [config.rows, step]),
            TensorDescriptor.from_tensor(tile.candidates, [config.columns, step]),
        )
    with on_device(queries):
        scores_kernel[(tiles if shift_overflowed is None else programs(queries, tiles),)](
            *(*operands, scale, tile.bias),
            *(row_shift_log2, factors, column_shift_log2, column_factors),
            *(stored, results.tile_row_sums, results.tile_column_sums, flags, any_flag),
            *(tile.target_starts, tile.target_columns, tile.lowest_targets, tile.highest_targets),
            *(tile.query_groups, tile.candidate_groups, tile.mask),
            *(tile.rows, columns, width // unit, tile.first_row, tile.first_column),
            *(queries.stride(0) // unit, queries.stride(1)),
            *(tile.candidates.stride(0) // unit, tile.candidates.stride(1)),
            0 if stored is None else stored.stride(0),
            *((0, 0) if tile.mask is None else tile.mask.stride()),
            MAXIMUM=row_shift_log2 is None and not sigmoid,
            SIGMOID=sigmoid,
            ROW_AND_COLUMN=of_columns is not None,
            BIAS=tile.bias is not None,
            REDUCE=results.tile_row_sums is not None,
            STORE=stored is not None,
            FACTORS=factors is not None and stored is not None,
            COLUMN_SUMS=results.tile_column_sums is not None,
            ONLY_OVERFLOWED=shift_overflowed is not None,
            LEAVE_OUT_DIAGONAL=tile.leave_out_diagonal,
            TARGETS=tile.target_starts is not None,
            GROUPS=tile.query_groups is not None,
            MASK=tile.mask is not None,
            EVEN_WIDTH=width % step == 0,
            EVEN_COLUMNS=columns % config.columns == 0,
            DESCRIPTORS=descriptors,
            UNIT=unit,
            COMPUTE=compute_dtype(queries.dtype),
            PRECISION=precision(),
            BLOCK_ROWS=config.rows,
            BLOCK_COLUMNS=config.columns,
            BLOCK_WIDTH=step,
            GROUP_ROWS=config.group,
            num_warps=config.warps,
            enable_fp_fusion=True,
            num_stages=config.stages,
        )


def _has_descriptor(x: Tensor) -> bool:
    """Whether a tensor descriptor can say where a matrix lies whose row stride is of whole 16 bytes."""
    return x.stride(1) == 1 and x.stride(0) >= x.shape[1] and x.data_ptr() % 16 == 0
