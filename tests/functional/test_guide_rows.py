"""What a guide takes from a row, beside scores in numpy's float64 that are compared in float32."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fastqt.engines import ops, own_products
from fastqt.functional.guide_rows import GuideRows

N, M = 60, 70
# The least and the largest decimal logarithm of norms.
NORMS = {"even": (0, 0), "spread": (-6, 6), "overflowing": (-25, 25), "underflowing": (-22, -20)}
OF_FLOAT16 = (-2, 2)


def embeddings(E: int, dtype: torch.dtype, norms: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(E)

    def drawn(rows: int) -> torch.Tensor:
        exponents = torch.rand(rows, 1, generator=generator, dtype=torch.float64)
        scale = 10 ** (norms[0] + (norms[1] - norms[0]) * exponents)
        return (scale * torch.randn(rows, E, generator=generator, dtype=torch.float64)).to(dtype)

    queries, candidates = drawn(N), drawn(M)
    candidates[5] = 0
    return queries, candidates


def scores_of(queries: torch.Tensor, candidates: torch.Tensor, normalize: bool) -> np.ndarray:
    f, g = (x.double().numpy() for x in (queries, candidates))
    if normalize:
        f, g = (x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12) for x in (f, g))
    with np.errstate(over="ignore"):
        return (f @ g.T).astype(np.float32)


@pytest.mark.parametrize("products", ["own", "torch"])
@pytest.mark.parametrize("norms", NORMS)
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("E", [1, 16, 1023])
def test_is_that_of_scores_in_float64(E, dtype, normalize, norms, products, monkeypatch):
    """Thresholds equal a score of their row, or are the numbers next to it."""
    if products == "torch":
        monkeypatch.setattr(own_products, "levels", lambda: (0, 0))
    queries, candidates = embeddings(E, dtype, OF_FLOAT16 if dtype is torch.float16 else NORMS[norms])
    scores = scores_of(queries, candidates, normalize)
    own = scores[np.arange(N), np.arange(N)]
    for thresholds in (own, np.nextafter(own, np.float32(-np.inf)), np.nextafter(own, np.float32(np.inf))):
        mask = torch.empty(N, M, dtype=torch.bool)
        GuideRows(queries, torch.from_numpy(thresholds), normalize=normalize).write_above(mask, candidates)
        assert torch.equal(mask, torch.from_numpy(scores > thresholds[:, None]))


@pytest.mark.skipif(ops.native_error is not None, reason="the C++ extension is not built")
def test_products_that_torch_rounds_are_not_taken(monkeypatch):
    monkeypatch.setattr(own_products, "levels", lambda: (0, 0))
    x, thresholds = torch.randn(3, 4), torch.zeros(3)
    assert GuideRows(x, thresholds, normalize=True).in_float32
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert not GuideRows(x, thresholds, normalize=True).in_float32
    finally:
        torch.set_float32_matmul_precision(before)
    assert GuideRows(x, thresholds, normalize=True).in_float32
