"""The kernel of the scores with each of its epilogues, beside the formulas in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks.gpu.recorder import recorded_check
from benchmarks.gpu.sections import NotTakenError, Options, Record, Verdict
from benchmarks.gpu.smoke.compare import near

if TYPE_CHECKING:
    from fastqt.kernels.launch import Config

SIZES, DRY_SIZES = (512, 700, 768), (21, 35, 24)
SUMS = 1e-3  # relative error of float32 sums: that of the scores, which become exponents
SHIFT = 3.0  # to base 2


@dataclass
class Inputs:
    queries: Tensor  # (N, D)
    candidates: Tensor  # (M, D)
    scale: Tensor  # () float32
    row_shift: Tensor  # (N,) float32, to base 2
    column_shift: Tensor  # (M,)
    row_factors: Tensor  # (N,) float32
    column_factors: Tensor  # (M,)

    def scores_log2(self) -> Tensor:
        """(N, M) float64, to base 2; -inf on the diagonal, which is excluded."""
        S = self.queries.double() @ self.candidates.double().T * self.scale.double() / math.log(2)
        diagonal = torch.ones_like(S, dtype=torch.bool).triu().tril()
        return S.masked_fill(diagonal, -math.inf)


@dataclass
class Outputs:
    """Where the kernel writes; all of it is NaN before."""

    matrix: Tensor  # (N, M)
    tile_row_sums: Tensor  # (column tiles, N) float32
    tile_column_sums: Tensor  # (row tiles, M) float32


def scores(options: Options, epilogue: str) -> Iterator[Record]:
    """An epilogue with operands from pointers, and with operands from tensor descriptors."""
    sizes = DRY_SIZES if options.dry_run else SIZES
    # The interpreter computes with numpy, which has no bfloat16.
    dtype = torch.float16 if options.dry_run else torch.bfloat16
    for way in ("plain", "descriptors"):
        test = partial(scores_verdict, epilogue, sizes, dtype, options.device, way == "descriptors")
        yield recorded_check(way, test)


def scores_verdict(
    epilogue: str, sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device, descriptors: bool
) -> Verdict:
    """Whether an epilogue writes what the formulas say, with the tiles that the engine would choose."""
    from fastqt.kernels.scores import Tile
    from fastqt.kernels.tuning import score_config

    if descriptors and device.type == "cuda" and torch.cuda.get_device_capability(device) < (9, 0):
        raise NotTakenError("tensor descriptors need compute capability 9.0")
    inputs = make_inputs(sizes, dtype, device)
    heavy = epilogue == "SIGMOID"
    config = replace(score_config(device, dtype, *sizes, heavy), descriptors=descriptors)
    out = make_outputs(sizes, dtype, device, config)
    tile = Tile(0, sizes[0], inputs.candidates, exclude_diagonal=True)
    LAUNCHES[epilogue](tile, inputs, out, config)
    return near(EXPECTED[epilogue](inputs, out))


def make_inputs(sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> Inputs:
    N, M, D = sizes
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    queries, candidates = ((drawn(rows, D) / D**0.25).to(device, dtype) for rows in (N, M))
    shifts = ((SHIFT + drawn(rows)).to(device) for rows in (N, M))
    factors = ((0.5 + drawn(rows).abs()).to(device) for rows in (N, M))
    return Inputs(queries, candidates, torch.full((), 0.9, device=device), *shifts, *factors)


def make_outputs(
    sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device, config: Config
) -> Outputs:
    from fastqt.engines.triton.operands import aligned
    from fastqt.kernels.scores import column_tiles, row_tiles

    N, M, _ = sizes

    def unwritten(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full(shape, math.nan, dtype=dtype, device=device)

    matrix = unwritten(N, aligned(M), dtype=dtype)[:, :M]
    return Outputs(matrix, unwritten(column_tiles(M, config), N), unwritten(row_tiles(N, config), M))


def launch_row_max(tile: Any, x: Inputs, out: Outputs, config: Config) -> None:
    from fastqt.kernels.scores import max_scores

    max_scores(tile, x.queries, x.scale, out.tile_row_sums, config)


def launch_exp(tile: Any, x: Inputs, out: Outputs, config: Config) -> None:
    from fastqt.kernels.scores import exp_scores

    exp_scores(
        tile,
        x.queries,
        x.scale,
        x.row_shift,
        config,
        exponentials=out.matrix,
        factors=x.row_factors,
        tile_row_sums=out.tile_row_sums,
    )


def launch_sigmoid(tile: Any, x: Inputs, out: Outputs, config: Config) -> None:
    from fastqt.kernels.scores import sigmoid_scores

    sigmoid_scores(
        tile,
        x.queries,
        x.scale,
        x.row_factors,
        config,
        probabilities=out.matrix,
        tile_row_sums=out.tile_row_sums,
        tile_column_sums=out.tile_column_sums,
    )


def launch_rows_and_columns(tile: Any, x: Inputs, out: Outputs, config: Config) -> None:
    from fastqt.kernels.scores import row_and_column_scores

    row_and_column_scores(
        tile,
        x.queries,
        x.scale,
        (x.row_shift, x.column_shift),
        config,
        factors=(x.row_factors, x.column_factors),
        total=out.matrix,
        tile_row_sums=out.tile_row_sums,
        tile_column_sums=out.tile_column_sums,
    )


LAUNCHES: dict[str, Callable[[Any, Inputs, Outputs, Config], None]] = {
    "ROW_MAX": launch_row_max,
    "EXP": launch_exp,
    "SIGMOID": launch_sigmoid,
    "EXP_ROWS_AND_COLUMNS": launch_rows_and_columns,
}

Comparisons = dict[str, tuple[Tensor, Tensor, float]]


def rounding(x: Tensor) -> float:
    """Of a stored value, as a bound of the relative error of many."""
    return float(torch.finfo(x.dtype).eps)


def row_maxima(x: Inputs, out: Outputs) -> Comparisons:
    return {"row maxima": (out.tile_row_sums.amax(0), x.scores_log2().amax(1), SUMS)}


def exponentials(x: Inputs, out: Outputs) -> Comparisons:
    E = (x.scores_log2() - x.row_shift.double()[:, None]).exp2()
    return {
        "row sums": (out.tile_row_sums.sum(0), E.sum(1), SUMS),
        "matrix": (out.matrix, E * x.row_factors.double()[:, None], rounding(out.matrix)),
    }


def sigmoids(x: Inputs, out: Outputs) -> Comparisons:
    S = x.scores_log2() * math.log(2)
    weighted = S.sigmoid() * x.row_factors.double()[:, None]
    return {
        "row sums": (out.tile_row_sums.sum(0), torch.nn.functional.softplus(S).sum(1), SUMS),
        "column sums": (out.tile_column_sums.sum(0), weighted.sum(0), SUMS),
        "matrix": (out.matrix, weighted, rounding(out.matrix)),
    }


def rows_and_columns(x: Inputs, out: Outputs) -> Comparisons:
    of_rows = (x.scores_log2() - x.row_shift.double()[:, None]).exp2()
    of_columns = (x.scores_log2() - x.column_shift.double()).exp2()
    total = of_rows * x.row_factors.double()[:, None] + of_columns * x.column_factors.double()
    return {
        "row sums": (out.tile_row_sums.sum(0), of_rows.sum(1), SUMS),
        "column sums": (out.tile_column_sums.sum(0), of_columns.sum(0), SUMS),
        "matrix": (out.matrix, total, rounding(out.matrix)),
    }


EXPECTED: dict[str, Callable[[Inputs, Outputs], Comparisons]] = {
    "ROW_MAX": row_maxima,
    "EXP": exponentials,
    "SIGMOID": sigmoids,
    "EXP_ROWS_AND_COLUMNS": rows_and_columns,
}
