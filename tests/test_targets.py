"""Target operators equal their matrices, written out by loops."""

import weakref

import numpy as np
import oracle
import pytest
import torch

import fastqt
from fastqt.targets import as_targets, window


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize(("N", "M"), [(8, 8), (8, 12), (12, 8)])
def test_window(size, N, M):
    offsets = [o for o in range(-size, size + 1) if o]
    np.testing.assert_array_equal(fastqt.Window(size).to_dense(N, M), oracle.window(N, M, offsets))


def test_edge_rows_renormalise():
    T = fastqt.Window(1).to_dense(5, 5)
    assert T[0].tolist() == [0, 1, 0, 0, 0]
    assert T[2].tolist() == [0, 0.5, 0, 0.5, 0]


def test_next_sentence_only_leaves_the_last_row_empty():
    T = fastqt.Window(offsets=[1]).to_dense(4, 4)
    np.testing.assert_array_equal(T, np.eye(4, k=1))


def test_window_of_documents_gives_consecutive_blocks():
    T = fastqt.Window(2, normalize=False, document_ids=torch.arange(6) // 3).to_dense(6, 6)
    block = np.ones((3, 3)) - np.eye(3)
    np.testing.assert_array_equal(T, np.kron(np.eye(2), block))


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


def test_class_indices_and_matrices_are_taken_as_they_are():
    assert as_targets(torch.tensor([2, -100])).to_dense(2, 3).tolist() == [[0, 0, 1], [0, 0, 0]]
    matrix = torch.rand(2, 3)
    np.testing.assert_array_equal(as_targets(matrix).to_dense(2, 3), matrix.double())
    np.testing.assert_array_equal(as_targets(matrix.to_sparse_csr()).to_dense(2, 3), matrix.double())


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


def test_a_window_that_a_cuda_graph_reads_is_kept(monkeypatch):
    """It stays however many others follow. What a capture makes lies in the graph's memory: never cached."""

    def columns(size, captured=False):
        monkeypatch.setattr(window, "_is_being_captured", lambda device: captured)
        return weakref.ref(fastqt.Window(1).rows(size, size, torch.device("cpu")).columns)

    monkeypatch.setattr(window, "_band_cache", {})
    monkeypatch.setattr(window, "_captured_bands", {})
    assert columns(9, captured=True)() is None
    read, others = columns(9), columns(10)
    assert columns(9, captured=True)() is read()
    for size in range(11, 40):
        columns(size)
    assert read() is not None
    assert others() is None
