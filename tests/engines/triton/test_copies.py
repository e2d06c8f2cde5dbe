"""Products that read copies of the embeddings, interpreted: aligned rows, and values rounded to TF32."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import fastqt
from fastqt.engines.triton import copies
from fastqt.engines.triton.copies import Copies
from fastqt.kernels.copies import copy_rows, is_aligned
from fastqt.problem import Problem
from fastqt.targets import Diagonal
from tests.shared.tolerances import FLOAT32, REORDERED_FLOAT32, THREE_ROUNDINGS, relative

N, M, K = 13, 17, 5
FLOAT32_LARGEST = torch.finfo(torch.float32).max
TF32_LARGEST = (2 - 2**-10) * 2.0**127
by_memory = pytest.mark.parametrize("memory", ["fast", "low"])
by_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


@pytest.fixture
def copied(monkeypatch):
    """Problems have copies however small they are; listed are the widths of these."""
    widths = []

    def copy(x, width, *, rounded):
        widths.append(width)
        return copy_rows(x, width, rounded=rounded)

    monkeypatch.setattr(copies, "LEAST_CELLS", 0)
    monkeypatch.setattr(copies, "copy_rows", copy)
    return widths


@pytest.fixture
def in_tf32():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


def nearest(x: torch.Tensor) -> np.ndarray:
    """The nearest values with 11 significant bits, of two that are as near the larger one, float64."""
    mantissa, exponent = np.frexp(np.abs(x.detach().double().numpy()))
    return np.copysign(np.ldexp(np.floor(2**11 * mantissa + 0.5) / 2**11, exponent), x.detach().numpy())


@by_dtype
@by_memory
@pytest.mark.parametrize("D", [1, 7, 50, 100, 300])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.pairwise
@pytest.mark.thinned(12)
def test_of_every_width(D, memory, dtype, normalize, copied):
    generator = torch.Generator().manual_seed(D)
    shapes = {"queries": (N, D), "candidates": (M, D), "negatives": (K, D)}
    inputs = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    options = {"diagonal": "keep", "scale": 1.5, "memory": memory, "normalize": normalize}
    loss = fastqt.contrastive_loss(**leaves, targets=fastqt.Diagonal(), backend="triton", **options)
    found = torch.autograd.grad(loss, list(leaves.values()))

    exact = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
    unit = {name: torch.nn.functional.normalize(x) if normalize else x for name, x in exact.items()}
    S = 1.5 * unit["queries"] @ torch.cat([unit["candidates"], unit["negatives"]]).T
    value = torch.nn.functional.cross_entropy(S, torch.arange(N))
    wanted = torch.autograd.grad(value, list(exact.values()))

    rounded = FLOAT32 + (2 if normalize else 1) * THREE_ROUNDINGS[dtype]
    assert relative(loss, value) < (rounded if normalize else FLOAT32)
    for gradient, of_oracle, x in zip(found, wanted, leaves.values(), strict=True):
        assert gradient.shape == x.shape
        assert gradient.is_contiguous()
        # The cosines of rows of one element have no gradient.
        assert (gradient - of_oracle).abs().max() < rounded * max(float(of_oracle.abs().max()), 1e-2)
    aligned = D % (16 // dtype.itemsize) == 0
    assert bool(copied) == (not aligned)


def released(queries, candidates, **options):
    return fastqt.mixcse_loss(queries, candidates, form="released", stop_gradient=False, **options)


def smoothed(queries, candidates, **options):
    targets = fastqt.smoothed(fastqt.Diagonal(), 0.1)
    return fastqt.contrastive_loss(queries, candidates, targets, diagonal="keep", **options)


def overflowing(queries, candidates, **options):
    return fastqt.contrastive_loss(queries, candidates, **{**options, "scale": 1000.0, "memory": "low"})


LOSSES = {
    "CLIP": fastqt.clip_loss,
    "sigmoid": lambda f, g, **o: fastqt.sigmoid_loss(f, g, fastqt.Diagonal(), diagonal="keep", **o),
    "released MixCSE": released,
    "smoothed": smoothed,
    "overflowing": overflowing,
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_of_every_computation(loss, monkeypatch):
    """The same as without copies, but for the order of sums."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(N, 7, generator=generator).requires_grad_() for _ in range(2)]
    results, widths = [], []
    for least in (2**62, 0):
        monkeypatch.setattr(copies, "LEAST_CELLS", least)
        genuine = copies.copy_rows
        monkeypatch.setattr(copies, "copy_rows", lambda *x, **o: widths.append(x[1]) or copy_rows(*x, **o))
        value = loss(*inputs, scale=2.0, backend="triton")
        results.append([value.detach(), *torch.autograd.grad(value, inputs)])
        monkeypatch.setattr(copies, "copy_rows", genuine)
    assert widths == [8, 8]
    for one, other in zip(*results, strict=True):
        assert relative(other, one) < REORDERED_FLOAT32


LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.T.contiguous().T,
    "part of a row": lambda x: torch.cat([x, x], 1)[:, 1 : 1 + x.shape[1]],
    "every second row": lambda x: x.repeat_interleave(2, 0)[::2],
}


@by_dtype
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_copies_have_the_same_bits_and_zeros(layout, dtype):
    x = layout(torch.randn(21, 300, generator=torch.Generator().manual_seed(0)).to(dtype))
    copy = copy_rows(x, 304, rounded=False)
    assert is_aligned(copy)
    assert torch.equal(copy[:, :300].contiguous().view(torch.uint8), x.contiguous().view(torch.uint8))
    assert (copy[:, 300:] == 0).all()


def test_what_is_aligned():
    x = torch.zeros(8, 304, dtype=torch.bfloat16)
    assert is_aligned(x)
    assert is_aligned(x[::2, :8])
    assert is_aligned(x[:1].expand(8, 304))
    for odd in (x[:, :300], x[:, 1:297], x.T, torch.zeros(8 * 303, dtype=x.dtype).view(8, 303)[:, :296]):
        assert not is_aligned(odd)


def test_rounds_to_the_nearest():
    bits = torch.randint(-(2**31), 2**31, (64, 64), generator=torch.Generator().manual_seed(0)).int()
    ties = (bits & ~0x1FFF) | 0x1000
    x = torch.cat([bits, ties]).view(torch.float32)
    normal = x.isfinite() & (x.abs() < TF32_LARGEST) & (x.abs() >= torch.finfo(torch.float32).tiny)
    x = torch.where(normal, x, 1.0)
    assert np.array_equal(copy_rows(x, 64, rounded=True).double().numpy(), nearest(x))


@pytest.mark.parametrize("sign", [1, -1])
def test_ends_of_the_range_stay_where_they_are(sign):
    """A NaN is one also where tensor cores drop its lower bits, and a finite value is finite."""
    nans = [0x7F800001, 0x7F801FFF, 0x7FBFFFFF, 0x7FC00000, 0x7FFFF000, 0x7FFFFFFF]
    bits = torch.tensor(nans, dtype=torch.int64) - (2**31 if sign < 0 else 0)
    x = torch.cat([bits.int().view(torch.float32)[:, None].expand(-1, 4)])
    upper = copy_rows(x, 4, rounded=True).view(torch.int32) & ~0x1FFF
    assert upper.view(torch.float32).isnan().all()

    below = math.nextafter(TF32_LARGEST, 0)
    for given, wanted in (
        (FLOAT32_LARGEST, TF32_LARGEST),
        (TF32_LARGEST, TF32_LARGEST),
        (below, TF32_LARGEST),
        (math.inf, math.inf),
        (0.0, 0.0),
        (2.0**-149, 0.0),  # half of the smallest subnormal of TF32 is 2^-137
        (2.0**-136, 2.0**-136),
    ):
        rounded = copy_rows(torch.full((1, 4), sign * given), 4, rounded=True)
        assert (rounded == sign * wanted).all()
        assert (rounded.signbit() == (sign < 0)).all()


@pytest.mark.parametrize("from_copies", [False, True], ids=["in registers", "in copies"])
@pytest.mark.parametrize("overflows", [False, True])
def test_products_are_of_rounded_operands(from_copies, overflows, in_tf32, monkeypatch):
    """Also where rows are repaired, and where the vendor's product lacks those whose shift overflowed."""
    monkeypatch.setattr(copies, "LEAST_CELLS", 0 if from_copies else 2**62)
    generator = torch.Generator().manual_seed(1)
    scale, spread = (0.3, 8.0) if overflows else (0.3, 1.0)
    f, g = (spread * torch.randn(n, 40, generator=generator) for n in (N, M))
    found = fastqt.log_sum_exp(f, g, scale=scale, diagonal="keep", backend="triton")
    S = scale * nearest(f) @ nearest(g).T
    wanted = torch.from_numpy(S).logsumexp(1)
    assert relative(found, wanted) < FLOAT32 / 20
    exact = (scale * f.double() @ g.double().T).logsumexp(1)
    assert relative(found, exact) > FLOAT32


def test_exact_cells_are_not_rounded(in_tf32, copied):
    """One pair, whose score is its logsumexp."""
    f, g = (torch.randn(1, 40, generator=torch.Generator().manual_seed(seed)) for seed in range(2))
    rows = fastqt.contrastive_loss(
        f, g, fastqt.Diagonal(), diagonal="keep", negatives=torch.zeros(1, 40), backend="triton"
    )
    score = f.double() @ g.double().T
    assert relative(rows, torch.nn.functional.softplus(-score).squeeze()) < FLOAT32 / 20
    assert copied == [40, 40, 40]


def problem(dtype=torch.bfloat16, D=300, rows=N):
    x = torch.randn(rows, D).to(dtype)
    targets = Diagonal().rows(rows, rows, x.device)
    return Problem(x, x.clone(), None, None, 1.0, targets, "keep", None, None, None)


def test_what_is_copied(in_tf32, copied):
    of_odd_width = problem()
    odd = Copies.of(of_odd_width, 2**20)
    assert (odd.width, odd.rounded, odd.bytes) == (304, False, 2 * N * 304 * 2)
    copied.clear()

    # Where rows of one side alone are not aligned, the other is read as it is.
    aligned = problem(D=304)
    sliced = replace(aligned, candidates=torch.randn(N, 305).bfloat16()[:, 1:])
    one = Copies.of(sliced, 2**20)
    assert one.queries is sliced.queries
    assert (one.width, one.bytes, copied) == (304, N * 304 * 2, [304])

    for untouched, room, rounds in (
        (aligned, 2**20, True),
        (of_odd_width, 4 * N * 304 * 2 - 1, True),  # More than half of the room.
        (problem(torch.float32, 304), 2**20, False),  # The vendor's products round by themselves.
    ):
        as_given = Copies.of(untouched, room, rounds=rounds)
        assert as_given.queries is untouched.queries
        assert as_given.candidates is untouched.candidates
        assert (as_given.rounded, as_given.bytes) == (False, 0)
    assert Copies.of(problem(torch.float32, 304), 2**20).rounded


def test_nothing_is_rounded_unless_tf32_is_allowed(copied):
    p = problem(torch.float32, 304)
    assert Copies.of(p, 2**30).queries is p.queries
    assert not copied
    assert not Copies.of(problem(torch.float32), 2**30).rounded


def test_a_small_problem_is_not_copied(in_tf32):
    p = problem()
    assert Copies.of(p, 2**30).queries is p.queries
