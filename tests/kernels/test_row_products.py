"""The product of the rows whose shift overflowed, interpreted: these rows alone, whatever is excluded."""

import math
from types import SimpleNamespace

import pytest
import torch

from fastqt.kernels import row_products
from fastqt.kernels.row_products import multiply_overflowed_rows
from tests.engines.triton.test_copies import nearest
from tests.kernels.test_scores import EVERYTHING, SCALE, N, excluding
from tests.shared.tolerances import FLOAT32, relative


@pytest.mark.parametrize("rows", [EVERYTHING, slice(24, N)], ids=["all rows", "rows from within a tile"])
@pytest.mark.parametrize("add", [False, True], ids=["first", "added"])
@pytest.mark.parametrize("D", [3, 40], ids=["single elements", "sixteen bytes"])
@pytest.mark.thinned(2)
def test_is_the_product_of_flagged_rows(rows, add, D, monkeypatch):
    for name, value in {"ROWS": 32, "COLUMNS": 16, "WIDTH": 16}.items():
        monkeypatch.setattr(row_products, name, value)
    what = {"diagonal", "targets", "groups", "mask"}
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


def test_operands_are_rounded_to_tf32():
    """Exponentials too, which are in registers: a product of operands that are cut off is too small."""
    tile, queries, candidates, _ = excluding(EVERYTHING, EVERYTHING, set(), 40)
    state = SimpleNamespace(shift_overflowed=torch.ones(N, dtype=torch.int32), row_shift_log2=torch.zeros(N))
    product = torch.empty(N, 40)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    multiply_overflowed_rows(tile, queries, torch.tensor(SCALE), state, product, add=False)
    torch.set_float32_matmul_precision(before)

    E = torch.from_numpy(SCALE * nearest(queries) @ nearest(candidates).T).exp()
    rounded = nearest(E) @ nearest(candidates)
    # An exponential that is near the middle of two values may be rounded to the other one.
    assert relative(product, rounded) < relative(E.numpy() @ nearest(candidates), rounded) / 4
