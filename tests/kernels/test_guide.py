"""Which of a guide's scores are above their thresholds by kernels, interpreted, beside float64."""

import math

import numpy as np
import pytest
import torch

import fastqt
from fastqt.engines import products
from fastqt.engines.guide_rows import InFloat64, guide_rows
from fastqt.engines.triton.guide import GuideKernels
from fastqt.kernels import guide as kernel
from fastqt.kernels.guide import write_above

ROWS, COLUMNS = 5, 37
LEAST_NORM = 1e-12
# The least and the largest decimal logarithm of norms. Beyond 19 squares overflow, and beyond 30 no product
# of rows at one norm decides.
NORMS = {"even": (0, 0), "spread": (-6, 6), "far": (-35, 35), "short": (-24, -20)}
OF_FLOAT16 = (-2, 2)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def tiles(monkeypatch):
    """Programs of 16 columns and steps of 64 elements, so that there are several, and ragged ones."""
    monkeypatch.setattr(kernel, "COLUMNS", 16)
    monkeypatch.setattr(kernel, "WIDTH", 64)


def drawn(width: int, dtype: torch.dtype, norms: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Embeddings of which a candidate is 0, three are copies of a query's positive, and a query is 0."""
    generator = torch.Generator().manual_seed(width)

    def of(rows: int) -> torch.Tensor:
        exponents = torch.rand(rows, 1, generator=generator, dtype=torch.float64)
        lengths = 10 ** (norms[0] + (norms[1] - norms[0]) * exponents)
        return lengths * torch.randn(rows, width, generator=generator, dtype=torch.float64) / width**0.5

    queries, candidates = of(ROWS), of(COLUMNS)
    candidates[30], queries[4] = 0, 0
    candidates[[31, 32, COLUMNS - 1]] = candidates[[0, 1, 2]]
    return queries.to(dtype), candidates.to(dtype)


def exact_scores(queries: torch.Tensor, candidates: torch.Tensor, normalize: bool) -> np.ndarray:
    f, g = (x.double().numpy() for x in (queries, candidates))
    if normalize:
        f, g = (x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), LEAST_NORM) for x in (f, g))
    with np.errstate(over="ignore"):
        return (f @ g.T).astype(np.float32)


def surrounded(x: torch.Tensor) -> torch.Tensor:
    """The same matrix as a part of another one, in which NaNs are around it and between its elements."""
    n, width = x.shape
    room = torch.full((n + 2, 2 * width + 3), math.nan, dtype=x.dtype)
    part = room[1:-1, 1 : 2 * width + 1 : 2]
    return part.copy_(x)


def above(rows: object, candidates: torch.Tensor) -> torch.Tensor:
    """What is written to a part of a matrix, of which nothing else may change."""
    room = (torch.arange((ROWS + 2) * (COLUMNS + 5)) % 3 == 0).view(ROWS + 2, COLUMNS + 5)
    before = room.clone()
    mask = room[1:-1, 2:-3]
    rows.write_above(mask, candidates)
    written, mask[:] = mask.clone(), before[1:-1, 2:-3]
    assert torch.equal(room, before)
    return written


@pytest.mark.parametrize("norms", NORMS)
@pytest.mark.parametrize("normalize", [True, False], ids=["cosines", "inner products"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 16, 83])
@pytest.mark.thinned(4)
def test_rows_are_compared_as_scores_in_float64(width, dtype, normalize, norms):
    """Thresholds equal the score of a positive, of which there are copies, or are the numbers next to it."""
    queries, candidates = drawn(width, dtype, OF_FLOAT16 if dtype is torch.float16 else NORMS[norms])
    scores = exact_scores(queries, candidates, normalize)
    own = scores[np.arange(ROWS), np.arange(ROWS)]
    for thresholds in (own, np.nextafter(own, np.float32(-np.inf)), np.nextafter(own, np.float32(np.inf))):
        rows = GuideKernels(surrounded(queries), torch.from_numpy(thresholds), normalize=normalize)
        wanted = torch.from_numpy(scores > thresholds[:, None])
        assert torch.equal(above(rows, surrounded(candidates)), wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_thresholds_that_exclude_all_or_none(dtype):
    queries, candidates = drawn(16, dtype, (0, 0))
    thresholds = torch.tensor([-math.inf, math.inf, -math.inf, math.nan, math.inf])
    rows = GuideKernels(queries, thresholds, normalize=True)
    assert torch.equal(above(rows, candidates), (thresholds == -math.inf)[:, None].expand(-1, COLUMNS))


@pytest.mark.parametrize("normalize", [True, False], ids=["cosines", "inner products"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_product_serves_the_thresholds_of_rows_and_those_of_columns(dtype, normalize, monkeypatch):
    multiplied, genuine = [], products.multiply
    monkeypatch.setattr(products, "multiply", lambda *x, **how: multiplied.append(1) or genuine(*x, **how))
    queries, candidates = drawn(16, dtype, (0, 0))
    scores = exact_scores(queries, candidates, normalize)
    thresholds = scores[:, 0].copy(), scores[0].copy()
    rows, columns = (
        GuideKernels(x, torch.from_numpy(t), normalize=normalize)
        for x, t in zip((queries, candidates), thresholds, strict=True)
    )
    of_rows, of_columns = rows.masks_both_ways(columns)
    assert torch.equal(of_rows, torch.from_numpy(scores > thresholds[0][:, None]))
    assert torch.equal(of_columns, torch.from_numpy(scores > thresholds[1]))
    assert not torch.equal(of_rows, of_columns)
    assert of_columns.is_contiguous()
    assert len(multiplied) == 1


def operands(width=16):
    queries, candidates = (x.double() for x in drawn(width, torch.float32, (0, 0)))
    scores = queries @ candidates.T
    ones = [torch.ones(n, dtype=torch.float64) for n in (ROWS, COLUMNS)]
    lengths = [x.norm(dim=1) for x in (queries, candidates)]
    rows, columns = zip(ones, lengths, strict=True)
    return queries, candidates, scores, rows, columns


@pytest.mark.parametrize("of_units", [True, False])
@pytest.mark.parametrize("sign", [1, -1])
def test_products_may_be_off_by_all_that_is_allowed(sign, of_units):
    """Thresholds are a rounding from the score of a cell, whose product is on the threshold's other side."""
    queries, candidates, scores, rows, columns = operands()
    error, k = 1e-3, torch.arange(ROWS) * 7
    thresholds = scores[torch.arange(ROWS), k].float()
    bounds = 0.999 * error * rows[1][:, None] * columns[1]
    approximate = (scores + sign * bounds) / 4
    if of_units:
        approximate /= (rows[1][:, None] * columns[1]).clamp(min=1e-9)
    mask = torch.empty(ROWS, COLUMNS, dtype=torch.bool)
    for t in (thresholds, thresholds.nextafter(torch.tensor(sign * math.inf))):
        write_above(
            *(mask, approximate.float(), queries.float(), candidates.float(), t, rows, columns),
            of_units=of_units,
            multiplier=4.0,
            error=error,
            least_error=0.0,
        )
        assert torch.equal(mask, scores.float() > t[:, None])


def test_products_decide_what_is_far_from_the_threshold_and_nothing_that_is_not_finite():
    queries, candidates, scores, rows, columns = operands()
    wrong = 10 * torch.sign(torch.arange(ROWS * COLUMNS).view(ROWS, COLUMNS) % 2 - 0.5)
    unknown = torch.arange(COLUMNS) % 5
    for k, x in enumerate((math.nan, math.inf, -math.inf)):
        wrong[:, unknown == k] = x
    mask, thresholds = torch.empty(ROWS, COLUMNS, dtype=torch.bool), torch.linspace(-1, 1, ROWS)
    write_above(
        *(mask, wrong, queries.float(), candidates.float(), thresholds, rows, columns),
        of_units=False,
        multiplier=1.0,
        error=1e-3,
        least_error=0.0,
    )
    wanted = torch.where(unknown < 3, scores.float() > thresholds[:, None], wrong > 0)
    assert torch.equal(mask, wanted)


def of_a_tensor_core(out, a, b, *, add):
    """Products are added one at a time; of both what is below the last bit of the larger is cut off."""
    sums = np.zeros(out.shape)
    for f, g in zip(a.double().numpy().T, b.double().numpy(), strict=True):
        terms = np.outer(f, g)
        last = np.exp2(np.frexp(np.maximum(abs(sums), abs(terms)))[1] - 24)
        sums = (np.trunc(sums / last) + np.trunc(terms / last)) * last
    out.copy_(torch.from_numpy(sums))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensor_cores_may_cut_off_what_they_add(dtype, monkeypatch):
    """The first product is 1, each other one too small to change the sum, and all together are not."""
    width = 513
    f, g = torch.full((ROWS, width), 2.0**-12), torch.full((COLUMNS, width), 1.9375 * 2.0**-12)
    f[:, 0], g[:, 0] = 1, 1
    f, g = f.to(dtype), g.to(dtype)
    monkeypatch.setattr(products, "multiply", of_a_tensor_core)
    scores = exact_scores(f, g, False)
    thresholds = torch.from_numpy(np.nextafter(scores[:, 0], np.float32(-np.inf)))
    assert above(GuideKernels(f, thresholds, normalize=False), g).all()


@pytest.mark.parametrize("sign", [1, -1])
def test_rows_of_float32_may_be_rounded_in_one_direction(sign, monkeypatch):
    """Each element of rows of this width is nearly half a bit of float16 from the number that it becomes."""
    monkeypatch.setattr(kernel, "WIDTH", 1024)
    x = torch.ones(COLUMNS, 1023)
    thresholds = torch.full((ROWS,), float(np.nextafter(np.float32(sign), np.float32(np.inf))))
    rows = GuideKernels(x[:ROWS] * sign, thresholds, normalize=True)
    assert not above(rows, x).any()
    rows = GuideKernels(x[:ROWS] * sign, torch.full((ROWS,), float(sign)), normalize=True)
    assert not above(rows, x).any()
    thresholds = torch.full((ROWS,), float(np.nextafter(np.float32(sign), np.float32(-np.inf))))
    assert above(GuideKernels(x[:ROWS] * sign, thresholds, normalize=True), x).all()


def test_who_compares(monkeypatch):
    x, thresholds = torch.randn(3, 4), torch.zeros(3)

    def kind(x, **how):
        return type(guide_rows(x, thresholds, normalize=True, **how))

    assert kind(x) is not GuideKernels
    monkeypatch.setenv("FASTQT_BACKEND", "triton")
    for dtype in DTYPES:
        assert kind(x.to(dtype)) is GuideKernels
    assert kind(x.double()) is InFloat64
    assert kind(x, in_plain_torch=True) is InFloat64

    before = torch.backends.cuda.matmul.allow_fp16_accumulation
    torch.backends.cuda.matmul.allow_fp16_accumulation = True
    try:
        assert kind(x) is not GuideKernels
        assert kind(x.half()) is not GuideKernels
        assert kind(x.bfloat16()) is GuideKernels
    finally:
        torch.backends.cuda.matmul.allow_fp16_accumulation = before


def test_a_loss_has_what_its_guide_leaves(monkeypatch):
    monkeypatch.setenv("FASTQT_BACKEND", "triton")
    generator = torch.Generator().manual_seed(0)
    x, y, of_guide, of_candidates = (torch.randn(13, 8, generator=generator) for _ in range(4))
    of_candidates[5:9] = of_candidates[:4]
    guide = fastqt.Guide(of_guide, of_candidates, negatives=of_candidates[:3], margin=0.1)
    losses = [
        fastqt.info_nce_loss(x, y, negatives=y[:3] + 1, exclude=guide, backend=backend)
        for backend in (None, "reference")
    ]
    torch.testing.assert_close(*losses)
