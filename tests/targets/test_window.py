"""Windows with smoothing: the matrix of the published re-implementation in one call, and the loss of it."""

import numpy as np
import pytest
import torch

import fastqt
from tests.shared import oracle
from tests.shared.tolerances import FLOAT32, FLOAT64

CPU = torch.device("cpu")


def test_the_published_figures():
    """N=400, offsets [1]: the positive 0.0268, all others 0.00244, the last row uniform."""
    T = fastqt.Window(offsets=[1], smoothing=0.1).to_dense(400, 400).numpy()
    assert f"{T[0, 1]:.4f} {T[0, 0]:.5f} {T[399, 0]:.4f}" == "0.0268 0.00244 0.0025"
    expected = np.full((400, 400), 0.1)
    expected[np.arange(399), np.arange(1, 400)] += 1
    np.testing.assert_allclose(T, expected / expected.sum(1, keepdims=True), rtol=1e-15)
    assert (T[399] == T[399, 0]).all()


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("weights", [None, [1, 10, 10, 1e-3], [1e-300, 1e300, 1, 1]])
@pytest.mark.parametrize(("N", "M"), [(9, 9), (9, 12), (12, 9)])
def test_smoothing_is_added_to_the_band_before_rows_are_divided(N, M, weights, normalize):
    window = fastqt.Window(2, weights=weights, normalize=normalize, smoothing=0.1)
    expected = oracle.smoothed(oracle.window(N, M, [-2, -1, 1, 2], weights, False), 0.1, normalize)
    np.testing.assert_allclose(window.to_dense(N, M), expected, rtol=1e-14)
    if weights is None and normalize:
        # Smoothing after the division gives each neighbour less where there are several.
        after = fastqt.smoothed(fastqt.Window(2), 0.1).to_dense(N, M)
        assert after[4, 5] < window.to_dense(N, M)[4, 5]


def test_no_matrix_is_made():
    rows = fastqt.Window(2, smoothing=0.1).rows(50_000, 50_000, CPU)
    assert rows.dense is None
    assert rows.columns.numel() == 4 * 50_000
    assert rows.background.shape == (50_000,)


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("cpu", torch.float64),
        ("torch", torch.float64),
        ("reference", torch.float64),
        ("cpu", torch.float32),
        ("triton", torch.float32),
    ],
)
def test_where_the_scores_have_converged_loss_and_gradients_are_0(backend, dtype):
    """The scores are the logarithms of the targets: the cross-entropy is the entropy, some nats a row."""
    n, window = 50 if backend == "triton" else 400, fastqt.Window(offsets=[1], smoothing=0.1)
    tolerance = {torch.float64: FLOAT64, torch.float32: FLOAT32}[dtype]
    queries = window.to_dense(n, n).log().to(dtype).requires_grad_()
    candidates = torch.eye(n, dtype=dtype).requires_grad_()
    options = {"diagonal": "keep", "backend": backend, "reduction": "sum"}
    loss = fastqt.contrastive_loss(queries, candidates, window, **options)
    assert abs(loss) < n * tolerance
    for gradient in torch.autograd.grad(loss, (queries, candidates)):
        assert gradient.abs().max() < 5 * tolerance


@pytest.mark.parametrize(
    ("smoothing", "error", "message"),
    [
        (0.0, ValueError, "smoothing: want a positive number, at least 1e-290, got 0.0"),
        (float("nan"), ValueError, "smoothing: want a finite number, got nan"),
        ("yes", TypeError, "smoothing: want a number, got str"),
    ],
)
def test_a_wrong_smoothing_is_refused(smoothing, error, message):
    with pytest.raises(error, match=message):
        fastqt.Window(smoothing=smoothing)


def test_smoothing_is_refused_where_cells_are_excluded():
    x = torch.ones(5, 3)
    with pytest.raises(ValueError, match="diagonal='exclude' forbids; use diagonal='zero' or 'keep'"):
        fastqt.contrastive_loss(x, x, fastqt.Window(smoothing=0.1), diagonal="exclude")
