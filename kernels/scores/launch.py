"""Launches of the kernel of the scores, one function for each of its epilogues."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fastqt.devices import properties, shared_bytes
from fastqt.kernels.addresses import elements_at_once, far, has_descriptor
from fastqt.kernels.launch import (
    INTERPRETED,
    Config,
    compute_dtype,
    multiprocessors,
    on_device,
    precision,
)
from fastqt.kernels.scores.epilogues import EXP, EXP_ROWS_AND_COLUMNS, ROW_MAX, SIGMOID
from fastqt.kernels.scores.mainloop import scores_kernel
from fastqt.kernels.scores.tile import Tile, column_tiles, row_tiles


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
    _launch(tile, queries, scale, config, EXP, operands)


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
    total: Tensor | None = None,  # (rows, columns), rows contiguous, with `factors`
    scores: Tensor | None = None,  # (rows, columns) float32, rows contiguous, without `factors`
    tile_row_sums: Tensor | None = None,  # (column_tiles, rows) float32
    tile_column_sums: Tensor | None = None,  # (row_tiles, columns) float32
) -> None:
    """Writes what becomes of exp(score - shift of its row) and exp(score - shift of its column).

    `tile_row_sums` are those of the first, `tile_column_sums` those of the second. `total` is each cell's
    first and second, each times its factor, added up. `scores` are kept to base 2, without shifts, for
    `kept_row_and_column_scores`.
    """
    of_rows, of_columns = factors or (None, None)
    operands = {
        "row_shift_log2": row_shift_log2[0],
        "column_shift_log2": row_shift_log2[1],
        "row_factors": None if total is None else of_rows,
        "column_factors": None if total is None else of_columns,
        "out": scores if total is None else total,
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
) -> None:
    """Writes row maxima of the scores to base 2; -inf where all cells are excluded."""
    _launch(tile, queries, scale, config, ROW_MAX, {"tile_row_sums": tile_row_sums})


def _launch(
    tile: Tile,
    queries: Tensor,
    scale: Tensor,
    config: Config,
    epilogue: tl.constexpr,
    operands: dict[str, Tensor | None],  # of the epilogue, by their names in the kernel
) -> None:
    columns, D = tile.candidates.shape
    tiles = row_tiles(tile.rows, config) * column_tiles(columns, config)
    unit = elements_at_once(queries, tile.candidates)
    step = config.width if unit > 1 else 16

    matrices: tuple[Tensor | TensorDescriptor, ...] = queries, tile.candidates
    descriptors = config.descriptors and unit > 1 and all(map(has_descriptor, (queries, tile.candidates)))
    if descriptors:
        matrices = (
            TensorDescriptor.from_tensor(queries, [config.rows, step]),
            TensorDescriptor.from_tensor(tile.candidates, [config.columns, step]),
        )

    out, products = operands.get("out"), precision(queries.dtype)
    with on_device(queries):
        scores_kernel[(resident_programs(queries, tiles, config, step),)](
            *matrices,
            scale,
            tile.rows,
            columns,
            D // unit,
            tile.first_row,
            tile.first_column,
            queries.stride(0) // unit,
            queries.stride(1),
            tile.candidates.stride(0) // unit,
            tile.candidates.stride(1),
            0 if out is None else out.stride(0),
            *tile.mask_strides,
            EPILOGUE=epilogue.value,
            EXCLUDE_DIAGONAL=tile.exclude_diagonal,
            EVEN_M=columns % config.columns == 0,
            EVEN_D=D % step == 0,
            DESCRIPTORS=descriptors,
            FAR=far(
                (None if descriptors else queries, config.rows, step),
                (None if descriptors else tile.candidates, config.columns, step),
                (out, config.rows, config.columns),
                (tile.mask, config.rows, config.columns),
            ),
            UNIT=unit,
            COMPUTE=compute_dtype(queries.dtype),
            PRECISION=products,
            ROUND=products == "tf32" and not tile.rounded,
            BLOCK_N=config.rows,
            BLOCK_M=config.columns,
            BLOCK_D=step,
            GROUP_N=config.group,
            target_starts=tile.target_starts,
            target_columns=tile.target_columns,
            **tile.operands,
            **operands,
            num_warps=config.warps,
            enable_fp_fusion=True,
            num_stages=config.stages,
        )


def resident_programs(queries: Tensor, tiles: int, config: Config, step: int) -> int:
    """The grid: as many programs as are resident at once, each of which walks over tiles.

    A new program would wait for the memory of the one before it.
    """
    if INTERPRETED:
        return min(tiles, multiprocessors(queries))
    stage = (config.rows + config.columns) * step * queries.element_size()
    gpu = properties(queries.device)
    resident = max(shared_bytes(gpu) // (config.stages * stage), 1)
    return min(tiles, resident * gpu.multi_processor_count)
