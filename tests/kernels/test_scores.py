"""The kernels of scores and of overflowed rows, interpreted, wherever a part of the matrix begins."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fastqt.kernels import row_products
from fastqt.kernels.row_products import multiply_overflowed_rows
from fastqt.kernels.scores import Tile, column_tiles, exp_scores, max_scores, row_and_column_scores, row_tiles
from fastqt.kernels.tuning import WHEN_INTERPRETED
from tests.shared.tolerances import FLOAT32, relative

N, SCALE = 70, 1.7
EVERYTHING = slice(0, N)
# Of targets from the diagonal: some tiles have a single target, in their first or last column.
OFFSETS = (-33, -32, -16, -1, 1, 15, 17)
PARTS = {
    "whole tiles": (slice(0, 64), slice(0, 64)),
    "everything": (EVERYTHING, EVERYTHING),
    "rows from within a tile": (slice(24, N), EVERYTHING),
    "columns from within a tile": (EVERYTHING, slice(33, 65)),
    "columns from the end of a row's tile": (EVERYTHING, slice(31, 63)),
}
by_part = pytest.mark.parametrize(("rows", "columns"), PARTS.values(), ids=PARTS)
by_what = pytest.mark.parametrize(
    "what",
    [
        *({"diagonal"}, {"targets"}, {"diagonal", "targets"}, {"targets", "thresholds"}),
        {"diagonal", "targets", "groups", "mask"},
    ],
    ids=lambda what: ", ".join(sorted(what)),
)
# Elements are read one by one, or by a descriptor, whose rows must be a multiple of 16 bytes long.
by_load = pytest.mark.parametrize(
    ("D", "config"),
    [(3, WHEN_INTERPRETED), (20, replace(WHEN_INTERPRETED, descriptors=True))],
    ids=["pointers", "descriptors"],
)


def excluding(rows: slice, columns: slice, what: set[str], D: int = 3):
    """A tile, its queries and candidates, and which of its cells (rows, columns) stay in E."""
    generator = torch.Generator().manual_seed(0)
    queries, candidates = (torch.randn(N, D, generator=generator) for _ in range(2))
    groups = torch.randint(5, (2, N), generator=generator, dtype=torch.int32)
    mask = torch.rand(N, N, generator=generator) < 0.3
    targets = [[i + offset for offset in OFFSETS if 0 <= i + offset < N] for i in range(N)]
    targets[20] = []
    tile = Tile(rows.start, rows.stop - rows.start, candidates[columns], columns.start)
    kept = np.ones((N, N), dtype=bool)
    given = {"exclude_diagonal": "diagonal" in what}
    if "diagonal" in what:
        np.fill_diagonal(kept, False)
    if "targets" in what:
        for i, of_row in enumerate(targets):
            kept[i, of_row] = False
        given |= {
            "target_starts": torch.tensor([0, *(len(of_row) for of_row in targets)]).cumsum(0),
            "target_columns": torch.tensor([j for of_row in targets for j in of_row]),
            "lowest_targets": torch.tensor([min(t, default=2**31 - 1) for t in targets], dtype=torch.int32),
            "highest_targets": torch.tensor([max(t, default=-1) for t in targets], dtype=torch.int32),
        }
    if "groups" in what:
        kept &= (groups[0][:, None] != groups[1]).numpy()
        given |= {"query_groups": groups[0], "candidate_groups": groups[1]}
    if "mask" in what:
        kept &= ~mask.numpy()
        given["mask"] = mask
    if "thresholds" in what:
        thresholds = 0.5 + torch.rand(N, generator=generator)  # below which each row has a cell
        kept &= (queries.double() @ candidates.double().T <= thresholds[:, None]).numpy()
        given["thresholds"] = thresholds
    return replace(tile, **given), queries, candidates, kept[rows, columns]


def sums_by_block(x: np.ndarray, step: int = WHEN_INTERPRETED.columns) -> np.ndarray:
    """Of columns."""
    return np.stack([x[:, start : start + step].sum(1) for start in range(0, x.shape[1], step)])


@by_load
@by_what
@by_part
@pytest.mark.thinned(4)
@pytest.mark.pairwise
def test_exponentials_and_their_sums(rows, columns, what, D, config):
    tile, queries, candidates, kept = excluding(rows, columns, what, D)
    shifts = torch.linspace(-1, 1, N)
    factors = torch.linspace(1, -1, N)
    E = torch.full(kept.shape, math.nan)
    tile_row_sums = torch.empty(column_tiles(kept.shape[1], WHEN_INTERPRETED), kept.shape[0])
    scale = torch.tensor(SCALE)
    exp_scores(
        *(tile, queries, scale, shifts, config),
        exponentials=E,
        factors=factors,
        tile_row_sums=tile_row_sums,
    )
    S = SCALE * queries.double().numpy() @ candidates.double().numpy().T
    exact = kept * np.exp(S - math.log(2) * shifts.double().numpy()[:, None])[rows, columns]
    assert relative(tile_row_sums, sums_by_block(exact)) < FLOAT32
    assert relative(E, exact * factors[rows, None].double().numpy()) < FLOAT32
    assert (E.numpy()[~kept] == 0).all()


@by_part
def test_exponentials_with_shifts_of_rows_and_of_columns(rows, columns):
    """The sums of either, and both with their factors added up."""
    tile, queries, candidates, kept = excluding(rows, columns, {"diagonal"})
    shifts = torch.linspace(-1, 1, N), torch.linspace(2, -1, N)
    factors = torch.linspace(1, -1, N), torch.linspace(-2, 1, N)
    height, width = kept.shape
    tile_row_sums = torch.empty(column_tiles(width, WHEN_INTERPRETED), height)
    tile_column_sums = torch.empty(row_tiles(height, WHEN_INTERPRETED), width)
    total = torch.full(kept.shape, math.nan)
    arguments = tile, queries, torch.tensor(SCALE), (shifts[0], shifts[1][columns]), WHEN_INTERPRETED
    row_and_column_scores(*arguments, tile_row_sums=tile_row_sums, tile_column_sums=tile_column_sums)
    row_and_column_scores(*arguments, factors=(factors[0], factors[1][columns]), total=total)
    S = SCALE * queries.double().numpy() @ candidates.double().numpy().T
    r, q = (math.log(2) * x.double().numpy() for x in shifts)
    of_rows, of_columns = (kept * np.exp(x)[rows, columns] for x in (S - r[:, None], S - q))
    u, v = (x.double().numpy() for x in factors)
    assert relative(tile_row_sums, sums_by_block(of_rows)) < FLOAT32
    assert relative(tile_column_sums, sums_by_block(of_columns.T, WHEN_INTERPRETED.rows)) < FLOAT32
    assert relative(total, of_rows * u[rows, None] + of_columns * v[columns]) < FLOAT32
    assert (total.numpy()[~kept] == 0).all()


@pytest.mark.parametrize("rows", [EVERYTHING, slice(24, N)], ids=["all rows", "rows from within a tile"])
@pytest.mark.parametrize("add", [False, True], ids=["first", "added"])
@pytest.mark.parametrize("D", [3, 40], ids=["single elements", "sixteen bytes"])
@pytest.mark.thinned(2)
def test_is_the_product_of_flagged_rows(rows, add, D, monkeypatch):
    for name, value in {"ROWS": 32, "COLUMNS": 16, "WIDTH": 16}.items():
        monkeypatch.setattr(row_products, name, value)
    what = {"diagonal", "targets", "groups", "mask", "thresholds"}
    tile, queries, candidates, kept = excluding(rows, EVERYTHING, what, D)
    generator = torch.Generator().manual_seed(1)
    bias = torch.randn(N, generator=generator)
    tile = type(tile)(**{**vars(tile), "bias": bias})
    flags = torch.zeros(N, dtype=torch.int32)
    flags[[1, 30, 31, N - 1]] = 1
    shifts = torch.linspace(-1, 1, N)
    state = SimpleNamespace(shift_overflowed=flags, row_shift_log2=shifts)
    height = rows.stop - rows.start
    # What was computed with the wrong shift may be anything.
    product = torch.full((height, D), math.nan)
    flagged = flags[rows] > 0
    if add:
        product[flagged] = 2.0
    multiply_overflowed_rows(tile, queries, torch.tensor(SCALE), state, product, add=add)
    S = SCALE * queries.double() @ candidates.double().T + bias.double()
    E = torch.from_numpy(kept) * (S - math.log(2) * shifts.double()[:, None])[rows].exp()
    assert relative(product[flagged], E[flagged] @ candidates.double() + 2.0 * add) < FLOAT32
    assert product[~flagged].isnan().all()


@by_what
@by_part
@pytest.mark.thinned(4)
def test_maxima(rows, columns, what):
    tile, queries, candidates, kept = excluding(rows, columns, what)
    blocks = column_tiles(kept.shape[1], WHEN_INTERPRETED)
    maxima = torch.empty(blocks, kept.shape[0])
    max_scores(tile, queries, torch.tensor(SCALE), maxima, WHEN_INTERPRETED)
    S = SCALE * queries.double().numpy() @ candidates.double().numpy().T / math.log(2)
    exact = np.where(kept, S[rows, columns], -np.inf).max(1)
    assert relative(maxima.amax(0), exact) < FLOAT32
