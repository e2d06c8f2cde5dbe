"""Where products are stored: in the memory of their gradients, where that does not cost accuracy."""

from dataclasses import replace

import pytest
import torch

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
