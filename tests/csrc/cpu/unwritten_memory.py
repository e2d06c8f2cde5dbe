"""Losses whose new memory holds NaN; run in a process that has loaded unwritten_memory.cpp before torch.

python -m tests.csrc.cpu.unwritten_memory problems cpu bfloat16 0 200   # random problems of seeds 0 to 199
python -m tests.csrc.cpu.unwritten_memory losses bfloat16               # every public loss
"""

from __future__ import annotations

import ctypes
import os
import sys
import warnings
from unittest import mock

import torch
from torch import Tensor

from fastqt.engines import cpu as schedule
from fastqt.engines.chunked import walk
from tests.shared.draws import Seeded
from tests.shared.every_loss import EVERY_LOSS
from tests.shared.gaps import NoGaps
from tests.shared.problem_check import check
from tests.shared.problems import Maker

ROOMS = (walk.ROOM["cpu"][0], 8000, 1)  # bytes of a chunk of the engine `torch`: all rows, a few, one
# Of the engine `cpu`: all rows at once, or few rows and columns.
TILES = (
    {"TILE_ROWS": schedule.TILE_ROWS},
    {"CHUNK_BYTES": 1, "MIN_CHUNK_ROWS": 3, "TILE_ROWS": 5, "TILE_COLUMNS": 7, "TILE_BYTES": 70},
    {
        "CHUNK_BYTES": 1,
        "MIN_CHUNK_ROWS": 2,
        "LOW_BYTES": 0,
        "TILE_ROWS": 4,
        "TILE_COLUMNS": 9,
        "TILE_BYTES": 72,
    },
)


def problems(backend: str, dtype: str, first: int, count: int) -> None:
    for number in range(first, first + count):
        problem = Maker(Seeded(number), [getattr(torch, dtype)], 40).problem
        room, tiles = ROOMS[number % 3], TILES[number % 3]
        try:
            with (
                mock.patch.dict(walk.ROOM, cpu=(room, room)),
                mock.patch.multiple(schedule, **tiles),
                NoGaps(),
            ):
                check(problem, backend)
        except Exception as error:
            raise RuntimeError(f"seed {number}: {problem}") from error


def losses(dtype: str) -> None:
    """Every public loss of rows that have NaN between them, in both directions."""
    for name, loss in EVERY_LOSS.items():
        inputs = loss.inputs(16, torch.Generator().manual_seed(0), False)
        for key, x in inputs.items():
            if x.is_floating_point() and x.dim() == 2 and "Matryoshka" not in name:
                x = wide(x.to(getattr(torch, dtype)))
            if x.is_floating_point():
                x = x.requires_grad_(key not in loss.constant)
            inputs[key] = x
        with NoGaps():
            found = loss.function(**inputs, **loss.options)
            leaves = [x for x in inputs.values() if x.requires_grad]
            for x in (found, *torch.autograd.grad(found.sum(), leaves)):
                assert x.isfinite().all(), name


def wide(x: Tensor) -> Tensor:
    """The same rows with NaN behind each."""
    rows = torch.full((x.shape[0], x.shape[1] + 3), torch.nan, dtype=x.dtype)
    rows[:, : x.shape[1]] = x
    return rows[:, : x.shape[1]]


def main() -> None:
    warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta state")
    assert torch.empty(1000).isnan().all()
    what, *arguments = sys.argv[1:]
    with mock.patch.multiple(schedule, has_bfloat16_products=lambda: True, CELLS_PER_TARGET=0):
        if what == "losses":
            losses(*arguments)
        else:
            backend, dtype, first, count = arguments
            problems(backend, dtype, int(first), int(count))
    operands = ctypes.CDLL(None).operands_of_16_bits
    operands.restype = ctypes.c_int64
    if {"cpu", "bfloat16"} <= set(arguments) and os.environ["FASTQT_CPU_PRODUCTS"] == "torch":
        assert operands() > 0  # The engine's own products of bfloat16 are made where processors have such.


if __name__ == "__main__":
    main()
