"""Target operators equal their matrices, written out by loops."""

import numpy as np
import pytest
import torch

import fastqt
from fastqt.targets import NoTargets, Pairs, as_targets, cache
from fastqt.targets.cache import RowsCache
from tests.shared import oracle

CPU = torch.device("cpu")


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize(("N", "M"), [(8, 8), (8, 12), (12, 8)])
def test_window(size, N, M):
    offsets = [o for o in range(-size, size + 1) if o]
    np.testing.assert_array_equal(fastqt.Window(size).to_dense(N, M), oracle.window(N, M, offsets))


def test_published_smoothing():
    """N=400, offsets [1]: the positive 0.0268, all others 0.00244, the last row uniform."""
    T = fastqt.smoothed(fastqt.Window(offsets=[1]), 0.1).to_dense(400, 400)
    assert T[0, 1].item() == pytest.approx(1.1 / 41)
    assert T[0, 0].item() == T[0, 2].item() == pytest.approx(0.1 / 41)
    assert T[399].tolist() == pytest.approx([1 / 400] * 400)
    assert T.sum(1).tolist() == pytest.approx([1] * 400)


def test_smoothing_twice_adds_up():
    T = fastqt.smoothed(fastqt.smoothed(fastqt.Window(), 0.1, normalize=False), 0.2).to_dense(7, 7)
    np.testing.assert_allclose(T, oracle.smoothed(oracle.window(7, 7, [-1, 1]), 0.3), rtol=1e-15)


@pytest.mark.parametrize("lower", [torch.Tensor.to_dense, torch.Tensor.to_sparse_csr])
def test_smoothing_where_candidates_are_more_than_queries(lower):
    matrix = torch.arange(12, dtype=torch.float64).reshape(3, 4) % 5
    T = fastqt.smoothed(lower(matrix), 0.5).to_dense(3, 4)
    np.testing.assert_allclose(T, oracle.smoothed(matrix.numpy(), 0.5), rtol=1e-15)
    assert T.sum(1).tolist() == pytest.approx([1, 1, 1])


def test_cached_windows_do_not_mix():
    """Small windows are cached under all that they depend on."""
    for N, M in [(6, 6), (6, 7)]:
        for offsets in ([1], [1, 2]):
            for weights in (None, [2.0, 3.0][: len(offsets)]):
                for normalize in (True, False):
                    window = fastqt.Window(offsets=offsets, weights=weights, normalize=normalize)
                    for _ in range(2):
                        np.testing.assert_array_equal(
                            window.to_dense(N, M), oracle.window(N, M, offsets, weights, normalize)
                        )


def fresh(targets, N, M):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "MOST_ENTRIES", 0)
        return targets.to_dense(N, M)


@pytest.mark.parametrize(
    "targets", [fastqt.Diagonal(), Pairs(), NoTargets(), fastqt.Window()], ids=lambda x: type(x).__name__
)
def test_targets_without_values_are_lowered_once(targets, monkeypatch):
    """For each size, and not where they are too large to keep."""
    monkeypatch.setattr(cache, "CACHED", RowsCache(size=8))
    monkeypatch.setattr(cache, "MOST_ENTRIES", 40)
    sizes = [(N, M) for N in (5, 6) for M in (6, 9)]
    first = {size: targets.rows(*size, CPU) for size in sizes}
    for size, rows in first.items():
        assert targets.rows(*size, CPU) is rows
        assert rows.cached
        assert torch.equal(rows.to_dense(*size), fresh(targets, *size))
    assert targets.rows(41, 41, CPU) is not targets.rows(41, 41, CPU)


@pytest.mark.parametrize(("N", "M"), [(4, 4), (4, 7)])
def test_class_indices_name_a_column_of_each_row_or_none(N, M):
    indices = torch.tensor([M - 1, -100, 0, 2])
    expected = torch.zeros(N, M, dtype=torch.float64)
    for row, column in enumerate(indices.tolist()):
        if column >= 0:
            expected[row, column] = 1
    rows = as_targets(indices).rows(N, M, CPU)
    assert torch.equal(rows.to_dense(N, M), expected)
    assert ((rows.columns >= 0) & (rows.columns < M)).all(), "kernels read the candidates of weight 0"


def sparse(starts, columns, values, M=4):
    return torch.sparse_csr_tensor(starts, columns, values, (len(starts) - 1, M), check_invariants=False)


def test_repeated_cells_of_a_sparse_matrix_are_summed():
    """In and out of order; zeros, and a column that two rows end and begin with, are no repetitions."""
    starts = torch.tensor([0, 4, 7, 8, 8])
    columns = torch.tensor([2, 1, 2, 2, 3, 3, 0, 0])
    values = torch.tensor([0.5, 0.25, 0.125, 1.0, 0.0, 2.0, 1.0, 3.0], dtype=torch.float64)
    dense = torch.tensor([[0, 0.25, 1.625, 0], [1, 0, 0, 2], [3, 0, 0, 0], [0, 0, 0, 0]], dtype=torch.float64)
    T = fastqt.Sparse(sparse(starts, columns, values))
    assert torch.equal(T.to_dense(4, 4), dense)


def test_summed_cells_equal_those_of_torch():
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        lengths = torch.randint(0, 6, (5,), generator=generator)
        starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        columns = torch.randint(0, 4, (int(lengths.sum()),), generator=generator)
        values = torch.randint(0, 9, columns.shape, generator=generator).double()
        expected = torch.zeros(5, 4, dtype=torch.float64)
        expected.index_put_((torch.repeat_interleave(lengths), columns), values, accumulate=True)
        found = fastqt.Sparse(sparse(starts, columns, values)).to_dense(5, 4)
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "starts",
    [[0, 2, 1, 3], [0, -1, 2, 3], [0, 1, 2, 99], [0, 1, 2, 2], [1, 1, 2, 3], [0, 2**62, 2, 3], [0, 1, 3, 1]],
)
def test_row_boundaries_that_do_not_fit_the_entries_are_refused(starts):
    columns, values = torch.tensor([0, 1, 2]), torch.ones(3)
    with pytest.raises(ValueError, match=r"^csr_tensor: want crow_indices that rise from 0 to 3"):
        fastqt.Sparse(sparse(torch.tensor(starts), columns, values))


def test_a_sparse_matrix_of_wrong_lengths_is_refused():
    tensor = sparse(torch.tensor([0, 1, 2, 3]), torch.tensor([0, 1, 2]), torch.ones(3))
    longer = torch.sparse_csr_tensor(
        tensor.crow_indices(), tensor.col_indices(), tensor.values(), (5, 4), check_invariants=False
    )
    with pytest.raises(ValueError, match=r"csr_tensor: want N \+ 1 = 6 crow_indices .* got 4 and 3"):
        fastqt.Sparse(longer)


@pytest.mark.parametrize("column", [-1, 4, 2**40])
def test_a_column_outside_a_sparse_matrix_is_named(column):
    targets = fastqt.Sparse(sparse(torch.tensor([0, 1, 3]), torch.tensor([1, 0, column]), torch.ones(3)))
    for backend in ("cpu", "reference"):
        with pytest.raises(ValueError, match=rf"targets: row 1's target column {column} is outside the M=4"):
            fastqt.contrastive_loss(
                torch.ones(2, 3), torch.ones(4, 3), targets, diagonal="keep", backend=backend
            )


@pytest.mark.parametrize("factor", [5e307, 1e-309, 1.7e308])
def test_weights_at_the_ends_of_float64_are_normalised(factor):
    """The quotients are those of the same weights around 1, where nothing overflows or is subnormal."""
    expected = fastqt.Window(2, weights=[1, 1, 1, 1]).to_dense(7, 7)
    found = fastqt.Window(2, weights=[factor] * 4).to_dense(7, 7)
    torch.testing.assert_close(found, expected, rtol=1e-15, atol=0)


def test_smoothing_at_the_ends_of_float64():
    ones = torch.ones(3, 5, dtype=torch.float64)
    for matrix in (ones * 5e307, (ones * 5e307).to_sparse_csr()):
        torch.testing.assert_close(fastqt.smoothed(matrix, 5e307).to_dense(3, 5), ones / 5)
    T = fastqt.smoothed(torch.zeros(3, 5, dtype=torch.float64), 1e-290).to_dense(3, 5)
    torch.testing.assert_close(T, ones / 5, rtol=1e-15, atol=0)


def test_the_offsets_of_a_window():
    assert fastqt.Window(2).offsets == (-2, -1, 1, 2)
    assert fastqt.Window(offsets=[3, -1]).offsets == (3, -1)
