"""Scores of minus a squared distance, against their definition by differences."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fastqt
from tests.shared.tolerances import (
    FLOAT32,
    FLOAT64,
    relative,
)

pytestmark = pytest.mark.usefixtures("low_memory_in_tiles")
N, M, D, K = 13, 17, 6, 5


def around(point: float, *shapes: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) + point for shape in shapes]
    return [x.to(dtype).requires_grad_() for x in drawn]


def scores_of(queries: Tensor, *columns: Tensor) -> Tensor:
    """Minus squared distances from columns of all rows (M, D) and of each (N, K, D)."""
    return -torch.cat([(queries[:, None] - x).square().sum(2) for x in columns], 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(
    "backend", ["cpu", "torch", "reference", pytest.param("triton", marks=pytest.mark.slow)]
)
def test_embeddings_that_are_far_from_the_origin(backend, dtype):
    """Where norms that are added to products have lost every digit."""
    if backend == "triton" and dtype is torch.float64:
        return
    leaves = around(100.0, (N, D), (M, D), (K, D), (N, 3, D), dtype=dtype)
    queries, candidates, negatives, stacked = leaves
    options = {
        "negatives": negatives,
        "row_negatives": stacked,
        "backend": backend,
        "similarity": "euclidean",
    }
    exact = [x.detach().double().requires_grad_() for x in leaves]
    scores, weights = scores_of(*exact), torch.linspace(0.5, 2, N, dtype=torch.float64)
    pairs = {"targets": fastqt.Diagonal(), "diagonal": "keep", "reduction": "none"}
    for loss, truth in (
        (
            fastqt.contrastive_loss(queries, candidates, **pairs, **options),
            scores.logsumexp(1) - scores.diagonal(),
        ),
        (fastqt.log_sum_exp(queries, candidates, **options), scores.logsumexp(1)),
    ):
        tolerance = FLOAT64 if dtype is torch.float64 else 5 * FLOAT32
        assert relative(loss, truth) < tolerance
        found = torch.autograd.grad(loss, leaves, weights.to(loss.dtype), retain_graph=True)
        wanted = torch.autograd.grad(truth, exact, weights, retain_graph=True)
        for a, b in zip(found, wanted, strict=True):
            assert relative(a, b) < tolerance


@pytest.mark.parametrize("backend", ["cpu", "torch", "reference"])
def test_of_rows_of_norm_1(backend):
    """The distances of normalised rows; a row of zeros stays at the origin."""
    leaves = around(0.0, (N, D), (M, D), (K, D), (N, 3, D), dtype=torch.float64)
    with torch.no_grad():
        leaves[1][3] = leaves[2][0] = leaves[3][2, 0] = 0
    options = {"similarity": "euclidean", "backend": backend, "normalize": True}
    found = fastqt.log_sum_exp(*leaves[:2], negatives=leaves[2], row_negatives=leaves[3], **options)
    wanted = scores_of(*(F.normalize(x, dim=-1) for x in leaves)).logsumexp(1)
    assert relative(found, wanted) < FLOAT64
    for a, b in zip(*(torch.autograd.grad(loss.sum(), leaves) for loss in (found, wanted)), strict=True):
        keep = b.abs() < 1e6  # not of zeros, whose derivative has no limit
        assert relative(a[keep], b[keep]) < 10 * FLOAT64


REFUSED = {
    "zero": ({}, "diagonal: want 'keep' or 'exclude' with similarity='euclidean'"),
    "mixed": ({"diagonal": "keep", "row_negatives": fastqt.Mixed()}, "row_negatives: want a tensor or None"),
    "a bias of another length": ({"diagonal": "keep", "bias": torch.zeros(3)}, "bias: want"),
    "no scale": ({"diagonal": "keep", "scale": 0.0}, "scale: want a positive number"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_the_argument(case):
    changes, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        fastqt.contrastive_loss(
            torch.zeros(N, D), torch.zeros(N, D), **{"similarity": "euclidean", **changes}
        )


@pytest.mark.parametrize("backend", ["cpu", "torch", "reference"])
def test_a_row_without_candidates_has_no_gradient(backend):
    generator = torch.Generator().manual_seed(0)
    queries, candidates = (torch.randn(n, 5, generator=generator, requires_grad=True) for n in (3, 4))
    scale = torch.tensor(2.0, requires_grad=True)
    mask = torch.zeros(3, 4, dtype=torch.bool)
    mask[1] = True
    rows = fastqt.log_sum_exp(
        queries, candidates, scale=scale, exclude=mask, similarity="euclidean", backend=backend
    )
    assert rows.isneginf().tolist() == [False, True, False]
    of_queries, of_candidates, of_scale = torch.autograd.grad(rows[1], (queries, candidates, scale))
    assert not of_queries.any()
    assert not of_candidates.any()
    assert of_scale == 0
