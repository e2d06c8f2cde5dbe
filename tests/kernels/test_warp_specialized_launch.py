"""What the warp-specialised kernel of the scores computes, and what is left to the ordinary one."""

import math
import sys
from dataclasses import replace

import pytest
import torch
import triton

from fastqt.kernels import scores
from fastqt.kernels.launch import Config
from fastqt.kernels.scores import Tile, exp_scores, warp_specialized, warp_specialized_launch
from fastqt.kernels.scores.epilogues import EXP, ROW_MAX
from fastqt.kernels.tuning import WHEN_INTERPRETED
from tests.shared.tolerances import FLOAT32, relative


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
