"""Rectangles of CLIP's scores, each found by itself, add up to the loss of the batch and to its gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from clip_oracle import ALL, assembled, clip
from tolerances import FLOAT64, relative
from torch import Tensor

import fastqt
from fastqt import engines
from fastqt.engines import cpu, cpu_clip, cuda, reference_clip
from fastqt.problem import ClipProblem, Needs

SIZES = (5, 1, 8)
N, D = sum(SIZES), 16
WEIGHTS = np.linspace(-0.5, 2, N)
# Float32 has the products of the embeddings below exactly, so that little more is rounded than the results.
WITHIN = {torch.float32: 1e-6, torch.float64: FLOAT64}
by_state = pytest.mark.parametrize("state", ["random", "converged"])
by_blocks = pytest.mark.parametrize("blocks", [False, True], ids=["own first", "blocks"])
by_dtype = pytest.mark.parametrize("dtype", WITHIN, ids=str)
by_normalize = pytest.mark.parametrize("normalize", [True, False], ids=["cosines", "products"])


def batch(state: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Embeddings of a few bits, and a scale; converged pairs have p > 1 - 1e-6."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-8, 9, (N, D), generator=generator) / 8 for _ in range(2))
    if state == "converged":
        two = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
        a = (torch.kron(torch.kron(two, two), torch.kron(two, two)) / 4)[:N]
        b = a + b / 16
    return a.to(dtype), b.to(dtype), torch.tensor(1.25 if state == "random" else 20.0)


def errors(
    module: Any, inputs: tuple[Tensor, Tensor, Tensor], sizes: tuple[int, ...] = SIZES, **options: Any
) -> list[float]:
    """How far loss and gradients are from the oracle's."""
    a, b, scale = inputs
    shards = list(zip(a.split(sizes), b.split(sizes), strict=True))
    exact = clip(
        *(x.double().numpy() for x in (a, b)), float(scale), WEIGHTS, options.get("normalize", False)
    )
    found = assembled(module, shards, scale, WEIGHTS, **options)
    return [relative(x, y) for x, y in zip(found, exact, strict=True)]


@pytest.fixture(params=["fast", "low", "tiles"])
def memory(request, monkeypatch):
    """The modes of the memory; small batches have one tile in both, so that the third has tiles of 3 x 4."""
    if request.param != "tiles":
        return request.param
    monkeypatch.setattr(cpu, "CHUNK_BYTES", 1)
    monkeypatch.setattr(cpu, "TILE_ROWS", 3)
    monkeypatch.setattr(cpu, "TILE_COLUMNS", 4)
    return "low"


@by_normalize
@by_blocks
@by_dtype
@by_state
def test_rectangles_add_up_to_the_loss_of_the_batch(state, dtype, blocks, normalize, memory):
    found = errors(cpu_clip, batch(state, dtype), blocks=blocks, memory=memory, normalize=normalize)
    assert max(found) < WITHIN[dtype]


@by_blocks
@by_dtype
@by_state
def test_the_reference_adds_up_too(state, dtype, blocks):
    assert max(errors(reference_clip, batch(state, dtype), blocks=blocks)) < WITHIN[dtype]


@by_normalize
@by_blocks
@by_dtype
@by_state
def test_equals_clip_loss(state, dtype, blocks, normalize):
    """The loss of the whole batch in one process, by the same engine."""
    a, b, scale = (x.to(dtype).requires_grad_() for x in batch(state, dtype))
    loss = fastqt.clip_loss(a, b, scale=scale, normalize=normalize, backend="cpu")
    wanted = [loss, *torch.autograd.grad(loss, (a, b, scale))]
    shards = [(x.detach(), y.detach()) for x, y in zip(a.split(SIZES), b.split(SIZES), strict=True)]
    mean = np.full(N, 1 / N)
    found = assembled(cpu_clip, shards, scale.detach(), mean, blocks=blocks, normalize=normalize)
    assert max(relative(x, y) for x, y in zip(found, wanted, strict=True)) < WITHIN[dtype]


@by_blocks
@pytest.mark.parametrize("module", [cpu_clip, reference_clip], ids=lambda module: module.__name__)
@pytest.mark.parametrize("sizes", [(0, N), (5, 0, 9), (N, 0), (1,) * N, (N,)], ids=str)
def test_shards_may_be_empty(module, sizes, blocks):
    assert max(errors(module, batch("random", torch.float64), sizes, blocks=blocks)) < FLOAT64


@pytest.mark.parametrize("module", [cpu_clip, reference_clip], ids=lambda module: module.__name__)
@pytest.mark.parametrize("wanted", ["queries", "candidates", "scale"])
def test_one_gradient_alone(module, wanted):
    inputs = batch("random", torch.float64)
    needs = Needs(**{wanted: True})
    found = errors(module, inputs, blocks=True, needs=needs)
    at = 1 + ALL._fields.index(wanted) if wanted != "scale" else 3
    assert found[at] < FLOAT64
    assert sum(error == 1 for error in found) == 2  # the others, which stay 0


@pytest.mark.parametrize("module", [cpu_clip, reference_clip], ids=lambda module: module.__name__)
def test_layouts_of_embeddings(module):
    a, b, scale = batch("random", torch.float64)
    strided = (a.T.contiguous().T, torch.stack([b, b], 2)[..., 0], scale)
    assert max(errors(module, strided, blocks=False)) < FLOAT64


@by_normalize
@pytest.mark.parametrize(("columns", "tile"), [(300, 256), (600, 600)])
def test_columns_beyond_a_stripe(columns, tile, normalize, monkeypatch):
    """Threads sum columns in stripes of 256."""
    monkeypatch.setattr(cpu, "CHUNK_BYTES", 1)
    monkeypatch.setattr(cpu, "TILE_COLUMNS", tile)
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(columns, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    sizes = (7, columns - 8, 1)
    shards = list(zip(a.split(sizes), b.split(sizes), strict=True))
    weights = np.linspace(0, 1, columns)
    exact = clip(a.numpy(), b.numpy(), 2.0, weights, normalize)
    for blocks in (False, True):
        found = assembled(cpu_clip, shards, torch.tensor(2.0), weights, blocks=blocks, normalize=normalize)
        assert max(relative(x, y) for x, y in zip(found, exact, strict=True)) < FLOAT64


def test_a_scale_must_be_finite():
    a, b, _ = batch("random", torch.float64)
    for module in (cpu_clip, reference_clip):
        with pytest.raises(ValueError, match="scale: want a finite number, got inf"):
            module.sums(ClipProblem(a, b, torch.tensor(np.inf), pairs=0))


def test_the_registry_finds_who_computes_rectangles():
    a, b, scale = batch("random", torch.float32)
    p = ClipProblem(a, b, scale, pairs=0)
    for name, module in {"cpu": cpu_clip, "reference": reference_clip}.items():
        assert engines.computation(engines.choose(name, p, a.dtype).name, p) is module
    assert engines.choose(None, p, a.dtype).name == "cpu"
    assert "triton" in engines.computation("triton", p).__name__
    assert "rectangle" in cuda._why_not_this(p)
    assert cuda._why_not_this(ClipProblem(a, b, scale)) is None
    # What is composed of two losses by autograd has no computation.
    assert not engines.ENGINES["reference"].computes(ClipProblem(a, b, scale))
