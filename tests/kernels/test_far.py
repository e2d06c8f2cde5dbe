"""Matrices whose offsets within a tile do not fit 32 bits, interpreted.

Their rows, or the elements of a row, lie gigabytes apart. That memory is virtual: nobody touches what lies
between. An offset that wraps around is within the same memory, where there are zeros.
"""

import math
import mmap

import pytest
import torch

import fastqt
from fastqt.kernels.addresses import far, has_descriptor
from fastqt.kernels.scores import Tile, exp_scores
from fastqt.kernels.tuning import WHEN_INTERPRETED
from tests.shared.tolerances import FLOAT32, relative

N, D = 16, 16  # a tile of the interpreter, whose last row or element is beyond 32 bits
UNCOUNTED = getattr(mmap, "MAP_NORESERVE", 0x4000)  # its number on Linux, which older Pythons do not name
APART = 8 * math.ceil(2**31 / 15 / 8)


def apart(x: torch.Tensor, *, transposed: bool = False) -> torch.Tensor:
    """The same matrix with rows, or elements of rows, far apart."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | UNCOUNTED
    size = (2**32 + 2**10) * x.element_size()
    memory = torch.frombuffer(mmap.mmap(-1, size, flags), dtype=x.dtype)
    strides = (1, APART) if transposed else (APART, 1)
    found = memory.as_strided(x.shape, strides, 2**31)
    found.copy_(x)
    return found


def rows_of(seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(N, D, generator=torch.Generator().manual_seed(seed)).to(dtype)


def softmax(queries, candidates, rows, **options):
    return fastqt.contrastive_loss(queries, candidates, row_negatives=rows, backend="triton", **options)


def negatives(queries, candidates, rows, **options):
    """All rows are computed again, because the scores of targets are small beside those of others."""
    return fastqt.contrastive_loss(
        queries, candidates, negatives=rows, scale=300.0, backend="triton", **options
    )


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "elements"])
@pytest.mark.parametrize("place", range(3), ids=["queries", "candidates", "negatives"])
@pytest.mark.parametrize(
    ("loss", "options"),
    [
        (softmax, {}),
        (softmax, {"normalize": True}),
        (negatives, {}),
        (negatives, {"memory": "low"}),
    ],
    ids=["row negatives", "cosines", "negatives", "low"],
)
@pytest.mark.thinned(5)
@pytest.mark.pairwise
def test_embeddings(loss, options, place, transposed):
    matrices = [rows_of(seed).requires_grad_() for seed in range(3)]
    expected = loss(*matrices, **options)
    others = list(matrices)
    others[place] = apart(matrices[place].detach(), transposed=transposed).requires_grad_()
    found = loss(*others, **options)
    assert torch.equal(found, expected)
    gradients = torch.autograd.grad(found, others), torch.autograd.grad(expected, matrices)
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "elements"])
@pytest.mark.parametrize("memory", ["fast", "low"])
@pytest.mark.thinned(2)
def test_a_mask(memory, transposed):
    mask = torch.rand(N, N, generator=torch.Generator().manual_seed(3)) < 0.4
    mask[-1] = True
    for offset in (-1, 1):
        mask.diagonal(offset).fill_(False)
    queries, candidates = (rows_of(seed).requires_grad_() for seed in range(2))

    def gradients(mask):
        options = {"exclude": mask, "scale": 300.0, "memory": memory, "backend": "triton"}
        loss = fastqt.contrastive_loss(queries, candidates, **options)
        return loss.detach(), *torch.autograd.grad(loss, (queries, candidates))

    for a, b in zip(gradients(apart(mask, transposed=transposed)), gradients(mask), strict=True):
        assert torch.equal(a, b)


STRIDES = [(2**31 // 128, 1), (1, 2**31 // 64), (2**30 // 128, 2**30 // 64), (2**40, 1)]


@pytest.mark.parametrize("strides", STRIDES)
def test_what_is_far(strides):
    """Of tiles of 128 rows and 64 columns."""
    x = torch.empty_strided((1, 1), strides, device="meta")
    assert far((None, 128, 64), (x, 128, 64))
    nearer = torch.empty_strided((1, 1), [stride - 1 for stride in strides], device="meta")
    last = sum((size - 1) * stride for size, stride in zip((128, 64), nearer.stride(), strict=True))
    assert far((nearer, 128, 64)) == (last + sum(nearer.stride()) >= 2**31)


def test_a_sample_of_many_candidates_is_far_and_they_are_not():
    candidates = torch.empty(2**23, 1024, dtype=torch.bfloat16, device="meta")
    assert not far((candidates, 256, 64))
    assert far((candidates[:: 2**23 // 256], 128, 64))


@pytest.mark.parametrize("apart", [2**39 - 8, 2**39])
def test_no_descriptor_has_rows_a_terabyte_apart(apart):
    x = torch.empty_strided((N, 768), (apart, 1), dtype=torch.bfloat16, device="meta")
    assert has_descriptor(x) == (apart * 2 < 2**40)


def test_exponentials():
    queries, candidates = (rows_of(seed, torch.float32) for seed in range(2))
    E = apart(torch.empty(N, N, dtype=torch.bfloat16))
    tile, shifts = Tile(0, N, candidates), torch.zeros(N)
    exp_scores(tile, queries, torch.tensor(0.5), shifts, WHEN_INTERPRETED, exponentials=E)
    exact = (0.5 * queries.double() @ candidates.double().T).exp()
    assert relative(E.double(), exact) < 2.0**-7 + FLOAT32
