"""Products of the extension and of torch by one function, beside numpy's in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fastqt.engines import own_products

ERRORS = {torch.float32: 1e-6, torch.float64: 1e-14}


def matrices(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(37, 50), (37, 300), (300, 50)]
    return [torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def error(found: torch.Tensor, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(found.double().numpy() - wanted) / np.linalg.norm(wanted))


@pytest.mark.parametrize("by_torch", [False, True])
@pytest.mark.parametrize("dtype", ERRORS, ids=str)
def test_values(dtype, by_torch, monkeypatch):
    if by_torch:
        monkeypatch.setattr(own_products, "levels", lambda: (0, 0))
    out, a, b = matrices(dtype)
    before, wanted = out.double().numpy().copy(), a.double().numpy() @ b.double().numpy()

    assert own_products.multiply(out, a, b, add=True) is out
    assert error(out, before + wanted) < ERRORS[dtype]
    assert error(own_products.multiply(out.fill_(np.nan), a, b), wanted) < ERRORS[dtype]
    assert error(own_products.product(a, b.T.contiguous().T), wanted) < ERRORS[dtype]
    columns = torch.full((50, 37), np.nan, dtype=dtype).T
    assert error(own_products.multiply(columns, a, b), wanted) < ERRORS[dtype]


def test_factors_are_rounded_where_the_processor_multiplies_bfloat16():
    out, a, b = matrices(torch.float32)
    rounds = own_products.levels()[1] != 0
    wanted = (x.bfloat16().double() if rounds else x.double() for x in (a, b))
    f, g = (x.numpy() for x in wanted)
    assert error(own_products.multiply(out, a, b, bfloat16=True), f @ g) < ERRORS[torch.float32]
