"""The warp-specialised kernel of the scores: its own source on numpy, with its roles in random turns."""

import math
from dataclasses import replace

import numpy as np
import pytest
from tolerances import FLOAT32, relative

from fastqt.kernels.scores import warp_specialized
from tests.kernels.gluon_on_numpy import Descriptor, Pointer, ProtocolError, run

GROUP_ROWS, BLOCK_M, BLOCK_D = 4, 16, 4
SCALE = 1.3
NOWHERE = 2**31 - 1
SHAPES = {  # rows, columns, depth, and where the rows and columns begin among all
    "a tile": (8, 16, 16, 0, 0),
    "whole tiles": (24, 48, 20, 0, 0),
    "partial tiles": (21, 37, 18, 0, 0),
    "less than a tile": (3, 5, 16, 0, 0),
    "a part of all": (13, 35, 23, 6, 4),
    "a longer ring's worth": (9, 17, 33, 1, 8),
}


class Problem:
    def __init__(self, shape, *, diagonal=True, targets=True, factors=False, stored=True, summed=True):
        rows, columns, depth, first_n, first_m = shape
        draw = np.random.default_rng(rows)
        everyone = first_n + rows + 5
        self.shape = shape
        self.queries = draw.normal(size=(everyone, depth)).astype(np.float32)
        self.candidates = draw.normal(size=(columns, depth)).astype(np.float32)
        self.shifts = np.linspace(-1, 1, everyone, dtype=np.float32)
        self.factors = np.linspace(1, -2, everyone, dtype=np.float32) if factors else None
        self.E = np.full((rows, columns), np.nan, np.float32) if stored else None
        self.sums = np.full((-(-columns // BLOCK_M), rows), np.nan, np.float32) if summed else None
        self.diagonal = diagonal
        self.targets = None
        if targets:
            span = first_m + columns
            self.targets = [sorted({i + 1, i // 2, (7 * i) % span} & set(range(span))) for i in range(everyone)]
            self.targets[first_n + 1] = []

    def run(self, *, programs=1, stages=3, lead=2, seed=0, kernel=warp_specialized):
        rows, columns, depth, first_n, first_m = self.shape
        cells = {}
        if self.targets is not None:
            lengths = [len(of_row) for of_row in self.targets]
            lists = {
                "target_starts": np.cumsum([0, *lengths]),
                "target_columns": np.concatenate(self.targets).astype(np.int64),
                "lowest_targets": np.array([min(t, default=NOWHERE) for t in self.targets], np.int32),
                "highest_targets": np.array([max(t, default=-1) for t in self.targets], np.int32),
            }
            cells = {name: Pointer(x) for name, x in lists.items()}
        run(
            kernel.warp_specialized_scores_kernel,
            programs,
            seed,
            queries=Descriptor(self.queries, (GROUP_ROWS, BLOCK_D)),
            candidates=Descriptor(self.candidates, (BLOCK_M, BLOCK_D)),
            out=None if self.E is None else Descriptor(self.E, (GROUP_ROWS, BLOCK_M // 4)),
            scale=Pointer(np.array([SCALE], np.float32)),
            row_shift_log2=Pointer(self.shifts),
            row_factors=None if self.factors is None else Pointer(self.factors),
            tile_row_sums=None if self.sums is None else Pointer(self.sums.reshape(-1)),
            **{"N": rows, "M": columns, "D": depth, "first_n": first_n, "first_m": first_m},
            EXCLUDE_DIAGONAL=self.diagonal,
            GROUP_N=2,
            STAGES=stages,
            LEAD=lead,
            **cells,
        )

    def check(self):
        """Every cell and every sum against float64, and exact zeros where cells are excluded."""
        rows, columns, _, first_n, first_m = self.shape
        part = slice(first_n, first_n + rows)
        x = SCALE * self.queries[part].astype(np.float64) @ self.candidates.T.astype(np.float64)
        E = np.exp(x - math.log(2) * self.shifts[part, None])
        i, j = np.arange(rows)[:, None] + first_n, np.arange(columns) + first_m
        excluded = (i == j) & self.diagonal
        for k, of_row in enumerate((self.targets or [])[part]):
            excluded[k] |= np.isin(j[0] if j.ndim > 1 else j, of_row)
        E[excluded] = 0
        if self.sums is not None:
            wanted = [E[:, start : start + BLOCK_M].sum(1) for start in range(0, columns, BLOCK_M)]
            assert relative(self.sums, np.stack(wanted)) < FLOAT32
        if self.E is not None:
            factors = 1 if self.factors is None else self.factors[part, None].astype(np.float64)
            assert relative(self.E, E * factors) < FLOAT32
            assert (self.E[excluded] == 0).all()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("given", [{}, {"factors": True, "summed": False}, {"stored": False}], ids=str)
def test_every_cell_and_sum(shape, given):
    problem = Problem(shape, **given)
    problem.run()
    problem.check()


def test_without_exact_cells():
    problem = Problem(SHAPES["partial tiles"], diagonal=False, targets=False)
    problem.run()
    problem.check()
