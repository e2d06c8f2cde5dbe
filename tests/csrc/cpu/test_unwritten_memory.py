"""What nobody has written reaches no result; no product is given what lies between the rows of an operand.

torch's products of bfloat16 read it on processors with AMX, where NaN times 0 is NaN. Losses are computed in
a process that has loaded unwritten_memory.cpp before torch, whose new memory holds NaN:

python -m tests.csrc.cpu.test_unwritten_memory problems cpu bfloat16 0 200   # of seeds 0 to 199
python -m tests.csrc.cpu.test_unwritten_memory losses bfloat16               # every public loss
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import warnings
from functools import cache
from importlib.metadata import version
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from fastqt.engines import cpu, ops
from fastqt.engines.chunked import walk
from fastqt.engines.cpu import contrastive as schedule
from fastqt.engines.products import multiply
from tests.csrc import building
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
            if x.is_floating_point() and x.dim() >= 2 and "Matryoshka" not in name:
                x = x.to(getattr(torch, dtype))
                x = wide(x) if x.dim() == 2 else x
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
    with mock.patch.multiple(cpu, has_bfloat16_products=lambda: True, CELLS_PER_TARGET=0):
        if what == "losses":
            losses(*arguments)
        else:
            backend, dtype, first, count = arguments
            problems(backend, dtype, int(first), int(count))
    operands = ctypes.CDLL(None).operands_of_16_bits
    operands.restype = ctypes.c_int64
    if {"cpu", "bfloat16"} <= set(arguments) and os.environ["FASTQT_CPU_PRODUCTS"] == "torch":
        assert operands() > 0  # The engine's own products of bfloat16 are made where processors have such.


pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="memory is filled by what glibc loads first"),
    pytest.mark.skipif(building.compiler() is None, reason="no C++ compiler"),
    pytest.mark.skipif(ops.native_error is not None, reason="the extension is not built"),
]


@cache
def preloaded() -> Path:
    include = Path(torch.__file__).parent / "include"
    flags = ["-O1", "-std=c++20", "-fPIC", f"-isystem{include}"]
    source = "tests/csrc/cpu/unwritten_memory.cpp"
    return building.build(
        {source: flags}, headers=[], link=["-shared", "-Wl,-z,lazy", "-ldl"], versions=[version("torch")]
    )


def run_in_a_process(*arguments: str, products: str) -> None:
    environment = {"LD_PRELOAD": str(preloaded()), "FASTQT_CPU_PRODUCTS": products, "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-m", "tests.csrc.cpu.test_unwritten_memory", *arguments]
    done = subprocess.run(
        command, cwd=building.ROOT, env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]


DTYPES = ("bfloat16", "float16", "float32", "float64")


@pytest.mark.parametrize(
    ("products", "count"),
    [("own", 24), *(pytest.param(name, 600, marks=pytest.mark.slow) for name in ("own", "torch"))],
)
def test_random_problems_in_bfloat16(products, count):
    run_in_a_process("problems", "cpu", "bfloat16", "0", str(count), products=products)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "backend"),
    [*((dtype, "cpu") for dtype in DTYPES), ("bfloat16", "torch"), ("float32", "reference")],
)
def test_random_problems(dtype, backend):
    run_in_a_process(
        "problems", backend, dtype, "5000", "150", products="own" if backend == "cpu" else "torch"
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_loss(dtype):
    run_in_a_process("losses", dtype, products="torch")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_products_of_the_emulated_engine(dtype):
    """A GPU's engine, whose E has columns that nobody writes, multiplies on a CPU where it is emulated."""
    E = torch.full((6, 16), torch.nan, dtype=dtype)
    E[:, :9] = torch.randn(6, 9)
    matrix, out = torch.randn(9, 5).to(dtype), torch.zeros(6, 5, dtype=dtype)
    with NoGaps():
        multiply(out, E[:, :9], matrix, add=False)
        multiply(torch.zeros(9, 5, dtype=dtype), E[:, :9].T, torch.ones(6, 5, dtype=dtype), add=True)
        with pytest.raises(AssertionError, match="mm"):
            torch.mm(E[:, :9], matrix)
    assert torch.equal(out, E[:, :9].contiguous() @ matrix)


if __name__ == "__main__":
    main()
