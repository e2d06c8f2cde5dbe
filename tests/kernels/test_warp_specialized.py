"""The warp-specialised kernel of the scores: its own source on numpy, with its roles in random turns."""

import importlib.util
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import triton

from fastqt.kernels import scores
from fastqt.kernels.launch import Config
from fastqt.kernels.scores import Tile, exp_scores, warp_specialized, warp_specialized_launch
from fastqt.kernels.scores.epilogues import EXP, ROW_MAX
from fastqt.kernels.tuning import WHEN_INTERPRETED
from tests.kernels.gluon_memory import Descriptor, Pointer, ProtocolError
from tests.kernels.gluon_on_numpy import run
from tests.shared.tolerances import FLOAT32, relative

GROUP_ROWS, BLOCK_M, BLOCK_D = 4, 16, 4
SCALE = 0.2
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
            self.targets = [
                sorted({i + 1, i // 2, (7 * i) % span} & set(range(span))) for i in range(everyone)
            ]
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


@pytest.mark.parametrize("stages", [2, 3, 5])
@pytest.mark.parametrize("steps", [0, 1, 4], ids=lambda more: f"{more} steps more than stages")
def test_any_order_of_turns(stages, steps):
    """Rings and tiles of several lengths, and every lead: no order deadlocks or mixes stages."""
    for lead in range(1, stages + 1):
        problem = Problem((11, 19, (stages + steps) * BLOCK_D - 1, 2, 3))
        problem.run(programs=2, stages=stages, lead=lead, seed=10 * stages + lead)
        problem.check()


def test_more_programs_than_tiles():
    problem = Problem(SHAPES["partial tiles"])
    problem.run(programs=20)
    problem.check()


# What is left out or changed, of which one must be noticed at once or as a wrong value.
MISTAKES = {
    "stages are filled before they are read": ("            mbarrier.wait(read.index(stage), phase)\n", ""),
    "stages are multiplied before they are filled": (
        "    mbarrier.wait(filled.index(stage), phase)\n",
        "",
    ),
    "one group's reading frees a stage": (
        "mbarrier.init(read.index(stage), count=GROUPS)",
        "mbarrier.init(read.index(stage), count=1)",
    ),
    "a stage is freed while its products are made": (
        "            mbarrier.arrive(read.index(before))\n",
        "            mbarrier.arrive(read.index(stage))\n",
    ),
    "the last stage of a tile is not freed": (
        "(0, deps=(scores,))\n        mbarrier.arrive(read.index(before))\n",
        "(0, deps=(scores,))\n",
    ),
    "phases do not alternate": ("gl.where(last, phase ^ 1, phase)", "phase"),
    "the ring is begun in the wrong phase": ("stage, phase = 0, 1", "stage, phase = 0, 0"),
    "the second group waits for the wrong tile": ("            lead_phase ^= 1\n", ""),
    "the second group is never led": (
        "mbarrier.arrive(led, pred=d == (LEAD - 1) * BLOCK_D)",
        "mbarrier.arrive(led, pred=d < 0)",
    ),
    "fewer bytes are expected": ("= GROUPS * queries.block_type.nbytes", "= queries.block_type.nbytes"),
    "a buffer is written while it is copied": (
        "            tma.store_wait(1)",
        "            tma.store_wait(2)",
    ),
    "copies are not ordered after stores": ("            fence_async_shared()\n", ""),
    "the kernel ends before its copies": ("        tma.store_wait(0)", "        tma.store_wait(1)"),
    "both groups read the same rows": ("stage * GROUPS + GROUP)", "stage * GROUPS)"),
    "sums are taken before products end": ("warpgroup_mma_wait(0, ", "warpgroup_mma_wait(1, "),
    "columns beyond the last are added up": ("if M - start_m < BLOCK_M:", "if M - start_m < 0:"),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_in_the_protocol_is_noticed(mistake, tmp_path):
    source = Path(warp_specialized.__file__).read_text()
    assert source.count(mistake[0]) == 1
    path = tmp_path / "mistaken.py"
    path.write_text(source.replace(*mistake))
    spec = importlib.util.spec_from_file_location("mistaken", path)
    mistaken = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mistaken)

    def right(seed):
        problem = Problem((21, 37, 18, 0, 0))
        try:
            problem.run(stages=3, lead=2, seed=seed, kernel=mistaken)
            problem.check()
        except AssertionError:  # a ProtocolError or a wrong value
            return False
        return True

    assert not all(right(seed) for seed in range(6))


def test_a_tile_of_fewer_steps_than_stages_is_noticed():
    """The first group gets a whole tile ahead, so that the second one waits for a phase that is over."""

    def run_in_many_orders():
        for seed in range(20):
            Problem((64, 16, BLOCK_D, 0, 0)).run(stages=5, lead=1, seed=seed)

    with pytest.raises(ProtocolError, match="wait for each other"):
        run_in_many_orders()


def asked(**changes):
    """What the launcher is asked: matrices that suit the kernel, but for what is changed."""
    queries, candidates = (torch.zeros(64, 256, dtype=torch.bfloat16) for _ in range(2))
    out, sums = torch.zeros(64, 64, dtype=torch.bfloat16), torch.zeros(1, 64)
    given = {"queries": queries, "out": out, "epilogue": EXP, **changes}
    of_tile = {name: x for name, x in given.items() if name in Tile.__dataclass_fields__}
    tile = Tile(0, 64, given.get("matrix", candidates), **of_tile)
    operands = {"out": given["out"], "tile_row_sums": sums, "tile_column_sums": given.get("column_sums")}
    config = given.get("config", Config(128, 256, 64, stages=4, warp_specialized=True))
    return tile, given["queries"], config, given["epilogue"], operands


BF16 = {"dtype": torch.bfloat16}
LEFT = {
    "another epilogue": ({"epilogue": ROW_MAX}, "exponentials"),
    "cosines": ({"query_inverse_norms": torch.ones(64)}, "norms"),
    "a mask": ({"mask": torch.zeros(64, 64, dtype=torch.bool)}, "masks"),
    "groups": ({"query_groups": torch.zeros(64, dtype=torch.int32)}, "groups"),
    "biases": ({"bias": torch.zeros(64)}, "biases"),
    "sums of columns": ({"column_sums": torch.zeros(1, 64)}, "columns"),
    "float32": ({"queries": torch.zeros(64, 256)}, "float32"),
    "float32 E": ({"out": torch.zeros(64, 64)}, "two bytes"),
    "few steps": ({"queries": torch.zeros(64, 192, **BF16)}, "4 stages of 64"),
    "rows of any length": ({"matrix": torch.zeros(64, 257, **BF16)[:, :256]}, "16 bytes"),
    "E with rows of any length": ({"out": torch.zeros(64, 63, **BF16)}, "16 bytes"),
    "an unaligned matrix": ({"matrix": torch.zeros(64 * 256 + 1, **BF16)[1:].view(64, 256)}, "16 bytes"),
    "a transposed matrix": ({"queries": torch.zeros(256, 64, **BF16).T}, "16 bytes"),
    "one row for all": ({"queries": torch.zeros(1, 256, **BF16).expand(64, 256)}, "16 bytes"),
}


@pytest.mark.parametrize(("changes", "words"), LEFT.values(), ids=LEFT)
def test_what_is_left_to_the_ordinary_kernel(changes, words, monkeypatch):
    monkeypatch.setattr(warp_specialized_launch, "unusable", lambda: None)
    assert warp_specialized_launch.why_not(*asked()) is None
    assert words in warp_specialized_launch.why_not(*asked(**changes))


def test_another_gluon_is_no_error(monkeypatch):
    """A Triton whose Gluon has other names leaves all to the ordinary kernel, and says so."""
    unusable = warp_specialized_launch.unusable.__wrapped__
    assert "interpreter" in unusable()
    monkeypatch.setattr(warp_specialized_launch, "INTERPRETED", False)
    assert unusable() is None
    monkeypatch.delattr(warp_specialized.tma, "async_load", raising=False)
    monkeypatch.delattr(warp_specialized.tma, "async_copy_global_to_shared")
    monkeypatch.delitem(sys.modules, warp_specialized.__name__)
    monkeypatch.delattr(scores, "warp_specialized")
    assert "async_copy_global_to_shared" in unusable()
    assert triton.__version__ in unusable()


def test_the_ordinary_kernel_makes_what_is_left_to_it():
    """The interpreter has no Gluon; a config that asks for the kernel computes the same."""
    generator = torch.Generator().manual_seed(0)
    queries, candidates = (torch.randn(40, 24, generator=generator) for _ in range(2))
    made = []
    for config in (WHEN_INTERPRETED, replace(WHEN_INTERPRETED, warp_specialized=True)):
        E = torch.full((40, 40), math.nan)
        exp_scores(
            Tile(0, 40, candidates), queries, torch.tensor(1.0), torch.zeros(40), config, exponentials=E
        )
        made.append(E)
    assert torch.equal(*made)
    assert relative(made[0], (queries @ candidates.T).exp()) < FLOAT32
