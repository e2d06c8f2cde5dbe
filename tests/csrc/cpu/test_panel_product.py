"""The micro-kernels' products equal those of numpy in float64, on every processor and in every layout."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import numpy as np
import pytest

from fastqt.engines import ops
from tests.csrc.cpu.processors import bound, passes, processors

AVX2, AVX512 = 2, 3
# Around the edges of tiles, of up to 14 rows and 32 columns, of sums, 192 terms, and of blocks, 1,024 terms.
ROWS, COLUMNS, DEPTHS = (1, 4, 13, 14, 15, 29), (1, 4, 12, 15, 16, 17, 33), (0, 1, 3, 4, 18, 193, 1030)


def levels_up_to(best: int) -> tuple[int, ...]:
    """The levels that a processor has whose best is this one; none has the level 0."""
    return (AVX2, AVX512) if best == AVX512 else (best,) if best else ()


def laid_out(random: np.random.Generator, rows: int, columns: int, layout: str) -> np.ndarray:
    """A random matrix whose rows are adjacent in memory, whose columns are, or neither."""
    if layout == "columns":
        return random.standard_normal((columns, rows), dtype=np.float32).T
    if layout == "neither":
        return random.standard_normal((rows, 3 * columns), dtype=np.float32)[:, ::3]
    return random.standard_normal((rows, columns + 1), dtype=np.float32)[:, :columns]


def memory_of(matrix: np.ndarray) -> np.ndarray:
    """The numbers of a matrix and what lies between them, without anything after the last one."""
    offsets = [(size - 1) * stride // 4 for size, stride in zip(matrix.shape, matrix.strides, strict=True)]
    numbers = sum(offsets) + 1 if matrix.size else 0
    return np.lib.stride_tricks.as_strided(matrix, (numbers,), (4,))


def strides(matrix: np.ndarray) -> tuple[int, int]:
    row, column = (stride // 4 for stride in matrix.strides)
    return row, column


@processors
def test_products_equal_those_in_float64(processor):
    run = passes(processor)
    levels = levels_up_to(int(run.best_vectors(np.zeros(1, np.float32))))
    if not levels:
        assert processor in ("x86-64", "clones, no AVX")
        return
    random = np.random.default_rng(0)
    layouts = itertools.cycle(itertools.product(("rows", "columns", "neither"), repeat=2))
    for level, m, n, k in itertools.product(levels, ROWS, COLUMNS, DEPTHS):
        of_a, of_b = next(layouts)
        a, b = laid_out(random, m, k, of_a), laid_out(random, k, n, of_b)
        add = bool(random.integers(2))
        memory = random.standard_normal((m, n + 2), dtype=np.float32)
        before = memory.copy()
        if not add:
            memory[:, :n] = np.nan

        out = memory_of(memory[:, :n]).copy()
        run.multiply_panels(
            *(out, memory_of(a).copy(), memory_of(b).copy(), n + 2, *strides(a), *strides(b)),
            *(m, n, k, np.float32(1.5), add, level),
        )
        memory.ravel()[: out.size] = out

        exact = 1.5 * (a.astype(np.float64) @ b) + (before[:, :n] if add else 0)
        error = np.abs(memory[:, :n] - exact)
        assert (error <= 1.5 * bound(a, b) + 2.0**-22 * np.abs(exact)).all(), (
            level,
            m,
            n,
            k,
            of_a,
            of_b,
            add,
        )
        np.testing.assert_array_equal(memory[:, n:], before[:, n:])


@pytest.mark.skipif(ops.native_error is not None, reason=str(ops.native_error))
@pytest.mark.parametrize("wanted", ["own", "torch", "mkl"])
def test_a_variable_chooses_the_products(wanted):
    program = "import fastqt.engines.ops, torch; print(*torch.ops.fastqt.product_levels())"
    run = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "FASTQT_CPU_PRODUCTS": wanted},
        capture_output=True,
        text=True,
    )
    if wanted == "mkl":
        assert "FASTQT_CPU_PRODUCTS: want own or torch, got mkl" in run.stderr
        return
    used, _, best, *_ = map(int, run.stdout.replace("True", "1").replace("False", "0").split())
    assert used == (best if wanted == "own" else 0)
