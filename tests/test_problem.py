"""Rows of norm 1 are those of `F.normalize`, and their gradients are too, to the second order."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastqt.norms import LEAST_NORM
from fastqt.problem import unit_rows
from tests.shared.tolerances import FLOAT64, REORDERED, relative

SHAPES = ((7, 5), (3, 4, 5), (0, 5))


def gradients(function: Callable[[Tensor], Tensor], x: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor]:
    leaf = x.clone().requires_grad_()
    unit = function(leaf)
    return unit.detach(), torch.autograd.grad(unit, leaf, upstream)[0]


def normalized(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("length", [1e-30, 1.0, 1e15])
def test_they_and_their_gradients_are_torchs(shape, length):
    x = length * torch.randn(shape, dtype=torch.float64)
    upstream = torch.randn(shape, dtype=torch.float64)
    for found, wanted in zip(
        gradients(unit_rows, x, upstream), gradients(normalized, x, upstream), strict=True
    ):
        assert relative(found, wanted) < FLOAT64


def test_the_bits_are_torchs():
    """So that what is learnt, whose gradient is what rounding leaves of it, is as exact."""
    x = torch.randn(200, 30)
    unit = normalized(x)
    for upstream in (torch.randn(200, 30), unit, unit + 1e-6 * torch.randn(200, 30)):
        found, wanted = gradients(unit_rows, x, upstream), gradients(normalized, x, upstream)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("norm", [0.0, LEAST_NORM / 2, 2 * LEAST_NORM])
def test_short_rows_are_divided_by_the_least_norm(norm):
    x = torch.randn(4, 6, dtype=torch.float64)
    x[1] *= norm / x[1].norm()
    x[2] = 0
    upstream = torch.randn(4, 6, dtype=torch.float64)
    found, wanted = gradients(unit_rows, x, upstream), gradients(normalized, x, upstream)
    assert all(relative(a, b) < FLOAT64 for a, b in zip(found, wanted, strict=True))


def test_float32_rows_near_the_ends_of_its_range():
    """Neither a norm's square nor its inverse is formed where float32 does not hold it."""
    x, upstream = torch.randn(2, 5, 8)
    for length in (1e-11, 1e15):
        found = gradients(unit_rows, length * x, upstream)
        wanted = gradients(normalized, (length * x).double(), upstream.double())
        assert all(relative(a, b) < REORDERED[torch.float32] for a, b in zip(found, wanted, strict=True))


def test_gradients_have_gradients():
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(unit_rows, x)
    assert torch.autograd.gradgradcheck(unit_rows, x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_computed_in_32(dtype):
    x, upstream = torch.randn(2, 9, 40).to(dtype)
    found, gradient = gradients(unit_rows, x, upstream)
    wanted, exact = gradients(normalized, x.float(), upstream.float())
    assert found.dtype is gradient.dtype is dtype
    assert torch.equal(found, wanted.to(dtype))
    assert relative(gradient, exact.to(dtype)) < torch.finfo(dtype).eps


def test_transforms_see_through_them():
    x = torch.randn(5, 4, dtype=torch.float64)
    found = torch.func.vmap(torch.func.grad(lambda row: unit_rows(row[None])[0, 0]))(x)
    wanted = torch.func.vmap(torch.func.grad(lambda row: normalized(row)[0]))(x)
    assert relative(found, wanted) < FLOAT64
