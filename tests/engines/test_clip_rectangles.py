"""Rectangles of CLIP's scores, each found by itself, add up to the loss of the batch and to its gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastqt import engines
from fastqt.engines.chunked import clip as chunked_clip
from fastqt.engines.chunked import walk
from fastqt.engines.cpu import clip as cpu_clip
from fastqt.engines.cpu import contrastive
from fastqt.engines.reference import clip as reference_clip
from fastqt.engines.triton import clip as triton_clip
from fastqt.problem import ClipProblem, ClipSide, Needs
from tests.shared.clip_oracle import ALL, assembled, clip
from tests.shared.tolerances import EAGER_FACTOR, FLOAT32, FLOAT64, relative

SIZES = (5, 1, 8)
N, D = sum(SIZES), 16
WEIGHTS = np.linspace(-0.5, 2, N)
# Float32 has the products of the embeddings below exactly, so that little more is rounded than the results.
WITHIN = {torch.float32: 1e-6, torch.float64: FLOAT64}
# Of modules the dtype of their sums and the bound of their errors; Triton has no float64.
MODULES = dict.fromkeys((cpu_clip, chunked_clip, reference_clip), (torch.float64, FLOAT64))
MODULES[triton_clip] = torch.float32, FLOAT32
by_module = pytest.mark.parametrize(
    "module",
    [*list(MODULES)[:-1], pytest.param(triton_clip, marks=pytest.mark.slow)],
    ids=lambda module: module.__name__,
)
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
    monkeypatch.setattr(contrastive, "CHUNK_BYTES", 1)
    monkeypatch.setattr(contrastive, "TILE_ROWS", 3)
    monkeypatch.setattr(contrastive, "TILE_COLUMNS", 4)
    return "low"


@by_normalize
@by_blocks
@by_dtype
@by_state
def test_rectangles_add_up_to_the_loss_of_the_batch(state, dtype, blocks, normalize, memory):
    found = errors(cpu_clip, batch(state, dtype), blocks=blocks, memory=memory, normalize=normalize)
    assert max(found) < WITHIN[dtype]


@by_normalize
@by_blocks
@by_dtype
@by_state
@pytest.mark.pairwise
def test_so_they_do_in_torch_operations(state, dtype, blocks, normalize, monkeypatch):
    """A few rows at a time."""
    monkeypatch.setattr(walk, "ROOM", {"cpu": (800, 800)})
    found = errors(chunked_clip, batch(state, dtype), blocks=blocks, normalize=normalize)
    assert max(found) < WITHIN[dtype]


@by_blocks
@by_module
@pytest.mark.parametrize("sizes", [(0, N), (5, 0, 9), (N, 0), (1, 1, 1, N - 3), (N,)], ids=str)
def test_shards_may_be_empty(module, sizes, blocks):
    dtype, within = MODULES[module]
    assert max(errors(module, batch("random", dtype), sizes, blocks=blocks)) < within


@by_module
@pytest.mark.parametrize("wanted", ["queries", "candidates", "scale"])
def test_one_gradient_alone(module, wanted):
    dtype, within = MODULES[module]
    found = errors(module, batch("random", dtype), blocks=True, needs=Needs(**{wanted: True}))
    at = 1 + ALL._fields.index(wanted) if wanted != "scale" else 3
    assert found[at] < within
    assert sum(error == 1 for error in found) == 2  # the others, which stay 0


@by_module
def test_layouts_of_embeddings(module):
    dtype, within = MODULES[module]
    a, b, scale = batch("random", dtype)
    strided = (a.T.contiguous().T, torch.stack([b, b], 2)[..., 0], scale)
    assert max(errors(module, strided, blocks=False)) < within


@by_normalize
@by_blocks
@by_state
def test_bfloat16_is_within_the_error_of_eager_pytorch(state, blocks, normalize, memory):
    """Its products are rounded; sums, the scores of pairs and what is added up are not."""
    D, sizes, scale = 48, (70, 1, 49), 20.0
    generator = torch.Generator().manual_seed(0)
    a, b = (F.normalize(torch.randn(sum(sizes), D, generator=generator), dim=1) for _ in range(2))
    if state == "converged":
        b = a + 0.3 * b
    a, b = a.bfloat16(), b.bfloat16()
    weights = np.full(len(a), 1 / len(a))
    exact = clip(a.double().numpy(), b.double().numpy(), scale, weights, normalize)
    shards = list(zip(a.split(sizes), b.split(sizes), strict=True))
    options = {"blocks": blocks, "memory": memory, "normalize": normalize}
    ours = assembled(cpu_clip, shards, torch.tensor(scale), weights, **options)

    leaves = [x.clone().requires_grad_() for x in (a, b)]
    units = [F.normalize(x, dim=1) if normalize else x for x in leaves]
    scores, own = scale * (units[0] @ units[1].T), torch.arange(len(a))
    loss = (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2
    eagers = [loss, *torch.autograd.grad(loss, leaves)]
    for x, eager, truth in zip(ours, eagers, exact[:3], strict=False):
        assert distance(x, truth) <= EAGER_FACTOR * distance(eager, truth) + 1e-6


def distance(x: Any, truth: Any) -> float:
    x = x.detach().double().numpy() if isinstance(x, Tensor) else x
    return float(np.linalg.norm(x - truth) / np.linalg.norm(truth))


@by_normalize
@pytest.mark.parametrize("memory", ["fast", "low"])
def test_scores_of_pairs_are_not_rounded(memory, normalize):
    """All other scores are 0, which bfloat16 holds; 3.3 it does not."""
    rows = torch.eye(48, dtype=torch.bfloat16) * (3 if normalize else 1)
    found = cpu_clip.sums(ClipProblem(rows[:20], rows, 3.3, memory, normalize, pairs=20))
    assert relative(found.positive, torch.full((20,), 3.3)) < 1e-6
    assert relative(found.row_others, torch.full((20,), np.log(47))) < 1e-6
    assert relative(found.column_others, np.log([19.0] * 20 + [20.0] * 28)) < 1e-6


@by_normalize
@pytest.mark.parametrize(("columns", "tile"), [(300, 256), (600, 600)])
def test_columns_beyond_a_stripe(columns, tile, normalize, monkeypatch):
    """Threads sum columns in stripes of 256."""
    monkeypatch.setattr(contrastive, "CHUNK_BYTES", 1)
    monkeypatch.setattr(contrastive, "TILE_COLUMNS", tile)
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(columns, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    sizes = (7, columns - 8, 1)
    shards = list(zip(a.split(sizes), b.split(sizes), strict=True))
    weights = np.linspace(0, 1, columns)
    exact = clip(a.numpy(), b.numpy(), 2.0, weights, normalize)
    for blocks in (False, True):
        found = assembled(cpu_clip, shards, torch.tensor(2.0), weights, blocks=blocks, normalize=normalize)
        assert max(relative(x, y) for x, y in zip(found, exact, strict=True)) < FLOAT64


def test_tiles_of_rectangles():
    def tiles(N: int, M: int, memory: str | int) -> tuple[int, int, int]:
        return cpu_clip._tiles(ClipProblem(torch.empty(N, 1), torch.empty(M, 1), 1.0, memory, pairs=0))

    assert tiles(1, 10**6, "low") == (1, 10**6, 1)
    assert tiles(1024, 8192, "low") == (1024, 4096, 1)
    assert tiles(8192, 1024, "low") == (1024, 1024, 4)


def test_a_scale_must_be_finite():
    a, b, _ = batch("random", torch.float64)
    for module in (cpu_clip, chunked_clip, reference_clip):
        with pytest.raises(ValueError, match=r"scale: want a finite number, .* got inf"):
            module.sums(ClipProblem(a, b, torch.tensor(np.inf), pairs=0))


def test_the_registry_finds_who_computes_rectangles():
    a, b, scale = batch("random", torch.float32)
    p = ClipProblem(a, b, scale, pairs=0)
    for name, module in {"cpu": cpu_clip, "torch": chunked_clip, "reference": reference_clip}.items():
        assert engines.choose(name, p, a.dtype).computation(p) is module
    assert engines.choose(None, p, a.dtype).name == "cpu"
    cuda = replace(engines.ENGINES["cuda"], devices=None, why_not_here=None)
    assert "rectangle" in cuda.why_not(p, a.device, a.dtype)
    assert cuda.why_not(ClipProblem(a, b, scale), a.device, a.dtype) is None
    # What is composed of two losses by autograd has no computation.
    assert not engines.ENGINES["reference"].computes(ClipProblem(a, b, scale))


@pytest.mark.parametrize("leaving", ["mask", "masks", "thresholds", "all"])
@pytest.mark.parametrize("multiples", [(1.0,), (0.5, 2.0)], ids=str)
def test_cells_of_the_reference_leave_rows_and_columns_apart(leaving, multiples):
    """In each side the weighted sum of logsumexps without the pair, and its gradient by autograd."""
    a, b, scale = (x.double() for x in batch("random", torch.float64))
    generator = torch.Generator().manual_seed(1)
    mask, column_mask = (
        (torch.rand(N, N, generator=generator) < 0.3).fill_diagonal_(False) for _ in range(2)
    )
    limits = torch.randn(N, generator=generator, dtype=torch.float64)
    limits = torch.maximum(limits, (a * b).sum(1))  # no pair is above its limit
    cases = {
        "mask": (mask, None, None),
        "masks": (mask, column_mask, None),
        "thresholds": (None, None, limits),
    }
    of_rows, of_columns, thresholds = cases.get(leaving, (mask, column_mask, limits))
    weights = torch.rand(2, len(multiples), N, generator=generator, dtype=torch.float64)

    x, y, s = (t.clone().requires_grad_() for t in (a, b, scale))
    products, eye = x @ y.T, torch.eye(N, dtype=torch.bool)
    rows, columns = eye | (of_rows if of_rows is not None else False), eye.clone()
    columns |= of_columns if of_columns is not None else of_rows if of_rows is not None else False
    if thresholds is not None:
        rows = rows | (products > thresholds[:, None])
        columns = columns | (products > thresholds)
    sides = [
        torch.stack([(k * s * products).masked_fill(cells, -torch.inf).logsumexp(dim) for k in multiples])
        for cells, dim in ((rows, 1), (columns, 0))
    ]
    exact = torch.autograd.grad(
        sum((w * side).sum() for w, side in zip(weights, sides, strict=True)), (x, y, s)
    )

    p = ClipProblem(a, b, scale=scale, pairs=N, multiples=multiples)
    p = replace(p, mask=of_rows, column_mask=of_columns, thresholds=thresholds)
    found = reference_clip.sums(p)
    assert relative(found.row_others, sides[0].detach().squeeze(0)) < FLOAT64
    assert relative(found.column_others, sides[1].detach().squeeze(0)) < FLOAT64
    others = [(side.detach().squeeze(0), w.squeeze(0)) for side, w in zip(sides, weights, strict=True)]
    of_pairs = torch.zeros(N, dtype=torch.float64)
    gradients = reference_clip.gradients_from(
        p, *(ClipSide(*side) for side in others), of_pairs, Needs(queries=True, candidates=True, scale=True)
    )
    for gradient, wanted in zip(
        (gradients.queries, gradients.candidates, gradients.scale), exact, strict=True
    ):
        assert relative(gradient, wanted) < FLOAT64
