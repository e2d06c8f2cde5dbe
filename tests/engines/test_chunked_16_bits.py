"""The engine "torch" where torch multiplies matrices of 16 bits into float32: where, and with what errors."""

from __future__ import annotations

import contextlib
import types
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fastqt
from fastqt import devices
from fastqt.engines import chunked
from fastqt.engines.chunked import walk
from tests.shared import clip_oracle, oracle
from tests.shared.tolerances import UNIT_ROUNDOFF
from tests.shared.wide_products import SIXTEEN_BITS, products_into_float32

N, D = 96, 48
by_dtype = pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=str)
by_state = pytest.mark.parametrize("state", ["random", "converged"])
by_height = pytest.mark.parametrize("height", [None, 7], ids=["one chunk", "rows"])


@pytest.fixture(autouse=True)
def multiplied():
    """A CPU that multiplies 16 bits as GPUs do, and the dtypes of what it multiplies."""
    with products_into_float32("CPU") as dtypes:
        yield dtypes


def in_chunks(height, monkeypatch):
    if height is not None:
        row_bytes = (2 * N + 3 * D) * 4 + 2 * N
        monkeypatch.setattr(walk, "ROOM", {"cpu": (height * row_bytes, height * row_bytes)})


def batch(state, dtype):
    """Embeddings that are converged where each pair has a cosine of about 0.96, and their true values."""
    generator = torch.Generator().manual_seed(0)
    a, b = (F.normalize(torch.randn(N, D, generator=generator), dim=1) for _ in range(2))
    if state == "converged":
        b = F.normalize(a + 0.3 * b, dim=1)
    # Norms that differ, so that none of them is forgotten.
    sizes = torch.linspace(0.5, 2, N)[:, None]
    if state == "random":
        a, b = a * sizes, b * sizes.flip(0)
    return [a.to(dtype), b.to(dtype)]


def error(x, exact):
    return np.linalg.norm(x.detach().double().numpy() - exact) / np.linalg.norm(exact)


def eager(x, y, scale, normalize, both_ways, dtype):
    if normalize:
        x, y = F.normalize(x, dim=1), F.normalize(y, dim=1)
    S, own = (x @ y.T) * scale, torch.arange(N)
    if both_ways:
        return (F.cross_entropy(S, own) + F.cross_entropy(S.T, own)) / 2
    return F.cross_entropy(S, own)


@by_height
@by_dtype
@by_state
@pytest.mark.parametrize("scale", [10.0, 25.0])
@pytest.mark.parametrize("normalize", [True, False], ids=["cosines", "products"])
@pytest.mark.parametrize("both_ways", [True, False], ids=["clip", "info_nce"])
@pytest.mark.pairwise
def test_errors_are_below_eagers(both_ways, normalize, scale, state, dtype, height, monkeypatch, multiplied):
    """And near what rounding the result alone would bring, where float16 has the range for it."""
    in_chunks(height, monkeypatch)
    function = fastqt.clip_loss if both_ways else fastqt.info_nce_loss
    ours = partial(function, scale=scale, normalize=normalize, backend="torch")

    leaves = [x.requires_grad_() for x in batch(state, dtype)]
    exact = clip_oracle.clip if both_ways else one_way
    a, b = (x.detach().double().numpy() for x in leaves)
    truth = exact(a, b, scale, np.full(N, 1 / N), normalize)[:3]

    errors = []
    for loss in (ours(*leaves), eager(*leaves, scale, normalize, both_ways, dtype)):
        results = [loss, *torch.autograd.grad(loss, leaves)]
        errors.append([error(x, y) for x, y in zip(results, truth, strict=True)])
    assert set(multiplied) == {dtype}
    assert (np.array(errors[0]) <= np.array(errors[1])).all()
    if dtype is torch.bfloat16:
        assert max(errors[0][1:]) < 1.5 * UNIT_ROUNDOFF[dtype]
        assert errors[0][0] < 1e-5


def one_way(a, b, scale, weights, normalize):
    norms = [np.linalg.norm(x, axis=1, keepdims=True) if normalize else np.ones((N, 1)) for x in (a, b)]
    units = [x / y for x, y in zip((a, b), norms, strict=True)]
    found = oracle.contrastive(*units, np.eye(N), diagonal="keep", scale=scale, row_weights=weights)
    gradients = []
    for gradient, unit, norm in zip((found.queries, found.candidates), units, norms, strict=True):
        radial = unit * (gradient * unit).sum(1, keepdims=True) if normalize else 0
        gradients.append((gradient - radial) / norm)
    return weights @ found.loss, *gradients


@by_height
@by_dtype
@pytest.mark.parametrize("both_ways", [True, False], ids=["clip", "info_nce"])
def test_rows_may_have_weights_of_any_size(both_ways, dtype, height, monkeypatch):
    """A small one's gradient is within the rounding of what is as large as it, and none is left out."""
    in_chunks(height, monkeypatch)
    weights = np.logspace(-3, 0, N) * np.where(np.arange(N) % 3, 1, -1)
    weights[5] = 0
    function = fastqt.clip_loss if both_ways else fastqt.info_nce_loss
    x, y = (x.requires_grad_() for x in batch("random", dtype))
    rows = function(x, y, scale=10.0, normalize=False, reduction="none", backend="torch")
    gradients = torch.autograd.grad(rows, (x, y), torch.from_numpy(weights).to(rows))

    exact = clip_oracle.clip if both_ways else one_way
    _, *truth = exact(x.detach().double().numpy(), y.detach().double().numpy(), 10.0, weights, False)[:3]
    for found, wanted in zip(gradients, truth, strict=True):
        assert error(found, wanted) < 2 * UNIT_ROUNDOFF[dtype]
    if not both_ways:
        of_rows = np.abs(gradients[0].double().numpy() - truth[0]).max(1)
        bound = 4 * UNIT_ROUNDOFF[dtype] * np.abs(truth[0]).max(1) + 1e-7
        assert (of_rows <= bound).all()


@by_height
def test_clip_makes_the_scores_of_its_last_chunk_once(height, monkeypatch, multiplied):
    in_chunks(height, monkeypatch)
    x, y = (x.requires_grad_() for x in batch("random", torch.bfloat16))
    fastqt.clip_loss(x, y, scale=10.0, backend="torch")
    chunks = 1 if height is None else -(-N // height)
    assert len(multiplied) == 4 * chunks - 1


def test_other_dtypes_and_cpus_without_the_product_take_float32(multiplied):
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float32, torch.float64):
        assert chunked.dtype_for(types.SimpleNamespace(queries=x), dtype) is dtype
    fastqt.info_nce_loss(x, x, backend="torch")
    assert not multiplied


def described(major):
    return devices.described(types.SimpleNamespace(major=major, minor=0))


@pytest.mark.parametrize(
    ("gpu", "in_float16", "in_bfloat16"),
    [
        (described(6), False, False),  # Pascal has no tensor cores
        (described(7), True, False),  # Volta's and Turing's have no bfloat16
        (described(8), True, True),
        (described(9), True, True),
        (contextlib.nullcontext(), False, False),  # no GPU that could be asked
    ],
    ids=["sm_60", "sm_70", "sm_80", "sm_90", "no GPU"],
)
def test_gpus_of_nvidia_multiply_what_their_tensor_cores_do(gpu, in_float16, in_bfloat16):
    with gpu:
        wanted = zip((torch.float16, torch.bfloat16), (in_float16, in_bfloat16), strict=True)
        for dtype, stays in wanted:
            found = devices.product_dtype(torch.device("cuda", 0), dtype)
            assert found is (dtype if stays else torch.float32)


@by_dtype
def test_gpus_of_intel_multiply_what_their_matrix_units_do(dtype, monkeypatch):
    xpu = torch.device("xpu", 0)
    assert devices.product_dtype(xpu, dtype) is torch.float32  # this torch has no product for it
    with products_into_float32("XPU"):
        assert devices.product_dtype(xpu, dtype) is torch.float32  # and no device
        monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
        for has_units in (True, False):
            gpu = types.SimpleNamespace(has_subgroup_matrix_multiply_accumulate=has_units)
            monkeypatch.setattr(torch.xpu, "get_device_properties", lambda _, gpu=gpu: gpu)
            assert devices.product_dtype(xpu, dtype) is (dtype if has_units else torch.float32)


@by_dtype
def test_apples_gpus_multiply_in_float32(dtype):
    """Their product of 16 bits is rounded to 16 bits."""
    assert devices.product_dtype(torch.device("mps"), dtype) is torch.float32


@pytest.mark.parametrize("both_ways", [True, False], ids=["clip", "info_nce"])
def test_float16_holds_gradients_of_learnt_pairs(both_ways):
    """All probabilities but the pairs' are below its smallest number."""
    x, y = (x.requires_grad_() for x in batch("converged", torch.float16))
    function, weights = fastqt.clip_loss if both_ways else fastqt.info_nce_loss, np.full(N, 2.0**14)
    rows = function(x, y, scale=25.0, normalize=False, reduction="none", backend="torch")
    gradients = torch.autograd.grad(rows, (x, y), torch.from_numpy(weights).to(rows))
    exact = clip_oracle.clip if both_ways else one_way
    _, *truth = exact(x.detach().double().numpy(), y.detach().double().numpy(), 25.0, weights, False)[:3]
    for found, wanted in zip(gradients, truth, strict=True):
        assert error(found, wanted) < 2 * UNIT_ROUNDOFF[torch.float16]
