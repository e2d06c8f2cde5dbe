"""The operator of single similarities: its values, the layouts that it reads, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fastqt.engines import ops

pytestmark = pytest.mark.skipif(ops.native_error is not None, reason="the C++ extension is not built")

LEAST_NORM = 1e-12
ERRORS = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 1e-6}  # of sums in float64, rounded once


def similarities(queries, candidates, rows, columns, normalize=True):
    return torch.ops.fastqt.row_similarities(queries, candidates, rows, columns, normalize, LEAST_NORM)


@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("normalize", [True, False])
def test_values_equal_those_in_float64(dtype, normalize):
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(2, 50, 2 * 37, generator=generator, dtype=torch.float64).to(dtype)
    queries, candidates = whole[:, :, :37]  # whose rows are further apart than they are long
    rows = torch.randint(50, (300,), generator=generator)
    columns = torch.randint(50, (300,), generator=generator)

    f, g = (x.double().numpy() for x in (queries, candidates))
    exact = np.einsum("ij,ij->i", f[rows], g[columns])
    if normalize:
        exact /= np.linalg.norm(f[rows], axis=1) * np.linalg.norm(g[columns], axis=1)
    values = similarities(queries, candidates, rows, columns, normalize)
    assert values.dtype == torch.promote_types(dtype, torch.float32)
    np.testing.assert_allclose(values, exact, rtol=ERRORS[dtype], atol=30 * ERRORS[dtype])


def test_short_rows_count_at_the_least_norm_and_nan_stays():
    queries = torch.tensor([[0.0, 0.0], [1e-20, 0.0], [float("nan"), 1.0]], dtype=torch.float64)
    candidates = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    values = similarities(queries, candidates, torch.arange(3), torch.zeros(3, dtype=torch.int64))
    assert values[:2].tolist() == pytest.approx([0.0, 1e-8])
    assert values[2].isnan()


@pytest.mark.parametrize(
    ("rows", "columns", "words"),
    [
        ([0, 5], [0, 1], "want indices of rows of 5 queries and 5 candidates"),
        ([0, 1], [-1, 1], "want indices of rows of 5 queries and 5 candidates"),
        ([0, 1], [0], "want two contiguous int64 vectors of one length"),
    ],
)
def test_indices_out_of_bounds_are_refused(rows, columns, words):
    x = torch.randn(5, 3)
    with pytest.raises(RuntimeError, match=words):
        similarities(x, x, torch.tensor(rows), torch.tensor(columns))


def test_embeddings_that_it_would_misread_are_refused():
    x, index = torch.randn(5, 3), torch.arange(3)
    for queries, candidates in (
        (x.half(), x.half()),
        (x, x.double()),
        (x, x[:, :2]),
        (x.T.contiguous().T, x),
    ):
        with pytest.raises(RuntimeError, match="want"):
            similarities(queries, candidates, index, index)


def write_above(mask, queries, candidates, thresholds, errors, products=None):
    ones = torch.ones(len(queries)), torch.ones(len(candidates))
    products = queries @ candidates.T if products is None else products
    factors = (*ones, thresholds, errors)
    torch.ops.fastqt.above_thresholds_(mask, products, queries, candidates, *factors, False, LEAST_NORM)
    return mask


def test_what_errors_leave_undecided_is_summed_in_float64():
    queries, candidates = torch.tensor([[1.0, 2.0**-30]]), torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    # In float32 both scores are 1, and in float64 the first is more: it rounds to 1, which is not above 1.
    below = torch.tensor([1.0]).nextafter(torch.tensor(0.0))
    for threshold, wanted in ((torch.tensor([1.0]), [False, False]), (below, [True, True])):
        mask = torch.empty(1, 2, dtype=torch.bool)
        assert write_above(mask, queries, candidates, threshold, torch.tensor([1e-6])).tolist() == [wanted]

    wrong = torch.tensor([[0.9999999, 1.0000001]])
    for errors, wanted in ((0.0, [False, True]), (1e-6, [False, False])):
        mask, margin = torch.empty(1, 2, dtype=torch.bool), torch.tensor([errors])
        found = write_above(mask, queries, candidates, torch.tensor([1.0]), margin, wrong)
        assert found.tolist() == [wanted]


@pytest.mark.parametrize("product", [float("inf"), float("-inf"), float("nan")])
def test_a_product_that_is_not_finite_decides_nothing(product):
    mask, x = torch.empty(1, 20, dtype=torch.bool), torch.ones(20, 3)
    products = torch.full((1, 20), product)
    for threshold, wanted in ((2.0, True), (3.0, False), (float("inf"), False), (float("nan"), False)):
        limit, errors = torch.tensor([threshold]), torch.zeros(1)
        assert write_above(mask, x[:1], x, limit, errors, products).tolist() == [20 * [wanted]]


def test_above_thresholds_writes_into_parts_of_a_matrix_and_passes_opcheck():
    generator = torch.Generator().manual_seed(0)
    queries, candidates = torch.randn(2, 40, 5, generator=generator)
    whole = torch.zeros(40, 60, dtype=torch.bool)
    thresholds, errors = torch.randn(40, generator=generator), torch.full((40,), 1e-5)
    write_above(whole[:, 7:47], queries, candidates, thresholds, errors)
    assert torch.equal(whole[:, 7:47], queries @ candidates.T > thresholds[:, None])
    assert not whole[:, :7].any()
    assert not whole[:, 47:].any()

    ones = torch.ones(40)
    arguments = (whole[:, 7:47], queries @ candidates.T, queries, candidates, ones, ones, thresholds, errors)
    torch.library.opcheck(torch.ops.fastqt.above_thresholds_.default, (*arguments, False, LEAST_NORM))
    of_rows = (queries, candidates, torch.arange(5), torch.arange(5), True, LEAST_NORM)
    torch.library.opcheck(torch.ops.fastqt.row_similarities.default, of_rows)


def test_above_thresholds_refuses_what_it_would_misread():
    x, mask, row = torch.randn(5, 3), torch.empty(5, 5, dtype=torch.bool), torch.ones(5)
    right = {"mask": mask, "products": x @ x.T, "queries": x, "candidates": x}
    right |= dict.fromkeys(("row_factors", "column_factors", "thresholds", "errors"), row)
    wrong = {
        "mask": [mask.float(), mask[:4], mask.T[:, :4], torch.empty(5, 5, 2, dtype=torch.bool)[..., 0]],
        "products": [right["products"].double(), torch.randn(5, 5, 2)[..., 0]],
        "queries": [x.double(), x.bfloat16(), x.T.contiguous().T],
        "candidates": [x[:, :2], x.T.contiguous().T],
        **{name: [row[:4], row.double(), torch.ones(10)[::2]] for name in list(right)[4:]},
    }
    for name, tensors in wrong.items():
        for tensor in tensors:
            with pytest.raises(RuntimeError, match="want"):
                torch.ops.fastqt.above_thresholds_(*(right | {name: tensor}).values(), False, LEAST_NORM)
