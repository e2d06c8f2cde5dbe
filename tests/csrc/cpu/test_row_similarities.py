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


def test_it_passes_opcheck():
    x = torch.randn(5, 3)
    arguments = (x, x, torch.arange(5), torch.arange(5), True, LEAST_NORM)
    torch.library.opcheck(torch.ops.fastqt.row_similarities.default, arguments)


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
