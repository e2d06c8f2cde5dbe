"""Where products are stored: in the memory of their gradients, where that does not cost accuracy."""

from dataclasses import replace

import pytest
import torch

import fastqt
from fastqt.engines.triton.operands import Operands
from fastqt.problem import Needs, Problem
from fastqt.targets import Diagonal

N, D = 6, 4
HALVES = (torch.bfloat16, torch.float16)


def operands_of(dtype, *, negatives=False, normalize=False):
    x = torch.randn(N, D, dtype=dtype)
    targets = Diagonal().rows(N, N, x.device)
    more = x.clone() if negatives else None
    p = Problem(x, x.clone(), more, None, 1.0, targets, "keep", None, None, None, normalize=normalize)
    return Operands(p, 1.0, Needs(queries=True, candidates=True, negatives=negatives))


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_a_product_is_rounded_only_where_nothing_is_added_to_it(dtype, normalize, alone):
    o = operands_of(dtype, normalize=normalize)
    o.make_products(alone=alone)
    of_rows = o.product_of_queries(slice(2, 5), alone=alone)
    in_place = dtype is torch.float32 or (dtype is torch.bfloat16 and alone and not normalize)
    gradients = o.query_gradient[2:5], o.blocks[0].gradient
    for product, gradient in zip((of_rows, o.blocks[0].product), gradients, strict=True):
        assert product.shape == gradient.shape
        assert product.dtype is (dtype if in_place else torch.float32)
        assert (product.data_ptr() == gradient.data_ptr()) == in_place


def test_the_product_of_rows_is_a_sum_over_candidates_and_negatives():
    o = operands_of(torch.bfloat16, negatives=True)
    assert o.product_of_queries(slice(0, N), alone=True).dtype is torch.float32


def test_no_product_of_rows_is_made_where_nothing_needs_it():
    o = operands_of(torch.bfloat16)
    of_candidates = Operands(replace(o.p), 1.0, Needs(candidates=True))
    assert of_candidates.product_of_queries(slice(0, N), alone=True) is None


def gradients(loss, f, g, dtype):
    f, g = (x.to(dtype, copy=True).requires_grad_() for x in (f, g))
    loss(f, g).backward()
    return f.grad, g.grad


def eager(f, g):
    """QuickThoughts' loss but for a constant, as it is written in PyTorch."""
    n = len(f)
    T = fastqt.Window().to_dense(n, n).to(f.dtype)
    scores = (f @ g.T).masked_fill(torch.eye(n, dtype=torch.bool), 0.0)
    return -(T * scores.log_softmax(1)).sum(1).mean()


@pytest.mark.parametrize("learnt", [0.0, 30.0])
def test_gradients_from_rounded_products_are_as_accurate_as_eager_ones(learnt):
    """The interpreter rounds to bfloat16 towards zero, which costs more than a GPU's rounding."""
    torch.manual_seed(0)
    f, g = torch.nn.functional.normalize(torch.randn(2, 40, 32), dim=2)
    f = 2 * f + learnt * (g.roll(1, 0) + g.roll(-1, 0))
    f, g = f.bfloat16().double(), g.bfloat16().double()
    expected = gradients(eager, f, g, torch.float64)
    of_eager = gradients(eager, f, g, torch.bfloat16)
    found = gradients(lambda *x: fastqt.contrastive_loss(*x, backend="triton"), f, g, torch.bfloat16)
    for ours, theirs, exact in zip(found, of_eager, expected, strict=True):
        error, eagers = ((x.double() - exact).norm() for x in (ours, theirs))
        assert error <= (0.1 if learnt else 1.5) * eagers
