"""Launches of the warp-specialised kernel, and what is left to the ordinary one.

Only a GPU's table chooses it, where `python -m benchmarks.tune` has found it to be the fastest.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastqt.kernels.launch import DESCRIBED_BYTES, INTERPRETED, Config, multiprocessors, on_device
from fastqt.kernels.plan import planned
from fastqt.kernels.scores.epilogues import EXP
from fastqt.kernels.scores.tile import Tile

REGISTERS = 168  # a thread, at first: three times 128 threads share 64 K, before the roles share them anew
DTYPES = (torch.bfloat16, torch.float16)


@functools.cache
def unusable() -> str | None:
    """Why this Triton cannot compile the kernel, or None."""
    if INTERPRETED:
        return "Triton's interpreter does not know Gluon"
    try:
        importlib.import_module(f"{__package__}.warp_specialized")
    except (ImportError, AttributeError) as error:
        return f"Triton {triton.__version__} has another Gluon than the kernel is written in: {error}"
    return None


def why_not(
    tile: Tile,
    queries: Tensor,  # (N, D)
    config: Config,
    epilogue: tl.constexpr,
    operands: Mapping[str, Tensor | None],  # of the epilogue, by their names in the kernel
) -> str | None:
    """Why the ordinary kernel has to make these scores, or None."""
    out, candidates = operands.get("out"), tile.candidates
    if epilogue.value != EXP.value:
        return "it makes exponentials, and nothing else"
    if tile.query_inverse_norms is not None:
        return "inverse norms of columns would take the registers of its products"
    if tile.mask is not None or tile.query_groups is not None or tile.bias is not None:
        return "masks, groups and biases would take the registers of its products"
    if operands.get("tile_column_sums") is not None:
        return "it adds up rows, not columns"
    if queries.dtype not in DTYPES or (out is not None and out.dtype not in DTYPES):
        return f"its tiles are of two bytes an element, not of {queries.dtype}"
    if triton.cdiv(queries.shape[1], config.width) < config.stages:
        return f"a width of {queries.shape[1]} is less than {config.stages} stages of {config.width}"
    if not all(map(_has_descriptor, (queries, candidates, *([] if out is None else [out])))):
        return "rows of its matrices must begin at multiples of 16 bytes, less than 2^40 bytes apart"
    return unusable()


def _has_descriptor(x: Tensor) -> bool:
    """Whether the copy engine can read and write a matrix."""
    row_bytes = x.stride(0) * x.element_size()
    rows_apart = row_bytes % 16 == 0 and row_bytes < DESCRIBED_BYTES and x.stride(0) >= x.shape[1]
    return rows_apart and x.stride(1) == 1 and x.data_ptr() % 16 == 0


@functools.cache
def _imported() -> Any:
    """The kernel, as others are launched. Its module is imported by then, where this Triton can do that."""
    from fastqt.kernels.scores.warp_specialized import warp_specialized_scores_kernel

    return planned(warp_specialized_scores_kernel)


def shared_bytes(config: Config, itemsize: int) -> int:
    """Of a program: the ring, two pieces of E for each group, and some for barriers and reductions."""
    ring = config.stages * (config.rows + config.columns) * config.width
    pieces = 2 * config.rows * config.columns // 4
    return (ring + pieces) * itemsize + 1024


def launch(
    tile: Tile, queries: Tensor, scale: Tensor, config: Config, operands: Mapping[str, Tensor | None]
) -> None:
    """Makes the exponentials of a tile for which `why_not` is None."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    def descriptor(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
        """Of blocks whose rows are as long as a pattern of shared memory in which no banks conflict."""
        layout = NVMMASharedLayout(min(columns * x.element_size(), 128), 8 * x.element_size())
        return TensorDescriptor.from_tensor(x, [rows, columns], layout)

    columns, D = tile.candidates.shape
    out, half = operands["out"], config.rows // 2
    tiles = triton.cdiv(tile.rows, config.rows) * triton.cdiv(columns, config.columns)
    with on_device(queries):
        _imported()[(min(tiles, multiprocessors(queries)),)](
            descriptor(queries, half, config.width),
            descriptor(tile.candidates, config.columns, config.width),
            scale,
            operands["row_shift_log2"],
            tile.rows,
            columns,
            D,
            tile.first_row,
            tile.first_column,
            EXCLUDE_DIAGONAL=tile.exclude_diagonal,
            GROUP_N=config.group,
            STAGES=config.stages,
            # While the first group is in an epilogue, the second one uses up this lead. The last quarter of
            # the ring hides how long copies take.
            LEAD=max(3 * config.stages // 4, 1),
            out=None if out is None else descriptor(out, half, config.columns // 4),
            row_factors=operands["row_factors"],
            tile_row_sums=operands["tile_row_sums"],
            target_starts=tile.target_starts,
            target_columns=tile.target_columns,
            lowest_targets=tile.lowest_targets,
            highest_targets=tile.highest_targets,
            num_warps=4,
            maxnreg=REGISTERS,
            enable_fp_fusion=True,
        )
