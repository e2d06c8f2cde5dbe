"""The kernel of the upstream gradient, interpreted: torch's products, and no access where the factor is 1."""

import pytest
import torch

from fastqt.autograd import times
from fastqt.kernels.upstream import AT_ONCE, scalable, scale_gradients

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = [(7, 3), (1000,), (), (0, 3), (513, 2)]  # more than one launch takes
SIGNALLING = 0x7F800001  # a NaN of float32 that any arithmetic would change


@pytest.mark.parametrize("upstream", [0.0, -0.5, 3.0, 2.0**16, float("inf"), float("nan")])
@pytest.mark.parametrize("multiplier", [1.0, 2.0**-6])
def test_is_torchs_product(upstream, multiplier):
    assert len(SHAPES) > AT_ONCE
    generator = torch.Generator().manual_seed(0)
    upstream = torch.tensor(upstream)
    for dtype in DTYPES:
        gradients = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
        expected = [times(g, upstream * multiplier) for g in gradients]
        scale_gradients(gradients, upstream, multiplier)
        for a, b in zip(gradients, expected, strict=True):
            # The interpreter cuts bfloat16 off where a GPU rounds to nearest.
            bits = 2.0**-7 if dtype is torch.bfloat16 else 0.0
            torch.testing.assert_close(a, b, rtol=bits, atol=0, equal_nan=True)


@pytest.mark.parametrize(("upstream", "multiplier"), [(1.0, 1.0), (64.0, 2.0**-6)])
def test_nothing_is_multiplied_by_1(upstream, multiplier):
    gradients = [torch.full((n,), SIGNALLING, dtype=torch.int32) for n in (5, 3000)]
    scale_gradients([g.view(torch.float32) for g in gradients], torch.tensor(upstream), multiplier)
    assert all((g == SIGNALLING).all() for g in gradients)
    scale_gradients([g.view(torch.float32) for g in gradients], torch.tensor(2.0), multiplier)
    assert not any((g == SIGNALLING).any() for g in gradients)


def test_what_is_left_for_torch():
    one, half = torch.ones(()), torch.ones(4, 4, dtype=torch.float16)
    assert scalable(half, one)
    assert not scalable(half.T[:2], one)  # not contiguous
    assert not scalable(half.double(), one)
    assert not scalable(half, one.double())
    assert not scalable(half.to("meta"), one)
