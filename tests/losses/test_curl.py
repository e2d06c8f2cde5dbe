"""CURL's losses equal their definitions and keep their inequalities."""

import math

import numpy as np
import pytest
import torch

import fastqt
from tests.shared.loss_views import D, K, views
from tests.shared.tolerances import FLOAT64, relative


def test_a_lost_margin_keeps_its_digits():
    f = torch.full((1, 1), 5.0, dtype=torch.float64, requires_grad=True)
    loss = fastqt.curl_loss(f, -torch.full_like(f, 2.5), torch.full_like(f, 2.5))
    assert relative(loss, 25 + math.log1p(math.exp(-25))) < FLOAT64
    (gradient,) = torch.autograd.grad(loss, f)
    assert relative(gradient, 5 / (1 + math.exp(-25))) < FLOAT64


DOCUMENTS = [0, 0, 0, 1, 2, 2, 3, 3, 3, 3, 4, 5, 5, 6]  # rows 3, 10 and 13 have no neighbour
LONELY = [3, 10, 13]


def curl_blocks_oracle(f, g, documents, k, negatives, order):
    """The loss of each row and its gradients dF (N, N, D) and dG (N, N, D), cell by cell in numpy float64."""
    n, width = f.shape
    losses, df, dg = np.zeros(n), np.zeros((n, n, width)), np.zeros((n, n, width))
    for i in range(n):
        around = [j for j in range(n) if 0 < abs(i - j) <= k and documents[i] == documents[j]]
        if not around:
            continue
        if negatives == "complement":
            others = [j for j in range(n) if j != i and j not in around]
        else:
            others = [(j + n // 2) % n if negatives == "shift" else order[j] for j in around]
        shares = np.zeros(n)
        for j in around:
            shares[j] += 1 / len(around)
        for j in others:
            shares[j] -= 1 / len(others)
        margin = f[i] @ (shares @ g)
        losses[i] = np.log1p(np.exp(-margin))
        slope = -1 / (1 + np.exp(margin))
        df[i, i], dg[i] = slope * (shares @ g), slope * np.outer(shares, f[i])
    return losses, df, dg


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("negatives", ["shift", "complement", "random"])
@pytest.mark.parametrize("documents", [DOCUMENTS, [0] * 14], ids=["documents", "one document"])
def test_rows_without_a_neighbour_cost_nothing(documents, negatives, k, reduction):
    """Their loss is exactly 0 and no gradient comes from it; the mean is over all rows."""
    f, g = inputs = views(14, 14)
    lonely = LONELY if documents is DOCUMENTS else []
    order = torch.randperm(14, generator=torch.Generator().manual_seed(3)).numpy()
    rows, df, dg = curl_blocks_oracle(*(x.detach().numpy() for x in inputs), documents, k, negatives, order)
    loss = fastqt.curl_block_loss(
        f,
        g,
        context_size=k,
        document_ids=torch.tensor(documents),
        negatives=negatives,
        generator=torch.Generator().manual_seed(3) if negatives == "random" else None,
        reduction=reduction,
    )
    if reduction == "none":
        assert not loss[lonely].any()
        assert (loss.detach() > 0).sum() == 14 - len(lonely)
        weights = np.linspace(-1, 2, 14)
        found = torch.autograd.grad(loss @ torch.from_numpy(weights), inputs)
        assert relative(loss, rows) < FLOAT64
    else:
        weights = np.full(14, 1 / 14 if reduction == "mean" else 1.0)
        found = torch.autograd.grad(loss, inputs)
        assert relative(loss, weights @ rows) < FLOAT64
    assert not found[0][lonely].any()
    for ours, wanted in zip(found, (df, dg), strict=True):
        assert relative(ours, np.einsum("i,ijd->jd", weights, wanted)) < FLOAT64


@pytest.mark.parametrize("largest", [1.0, math.inf])
@pytest.mark.parametrize("negatives", ["shift", "complement", "random"])
def test_where_no_row_has_a_neighbour_the_loss_is_0(negatives, largest):
    """Also where a candidate is infinite, and with it the mean of the others."""
    f, g = inputs = views(8, 8)
    with torch.no_grad():
        g[5] *= largest
    loss = fastqt.curl_block_loss(f, g, document_ids=torch.arange(8), negatives=negatives)
    assert loss == 0
    for gradient in torch.autograd.grad(loss, inputs):
        assert not gradient.any()


@pytest.mark.parametrize("k", [1, 2])
def test_shifted_blocks_are_taken_where_they_share_no_sentence_and_refused_elsewhere(k):
    for rows in range(k + 1, 4 * k + 6):
        inputs = views(rows, rows)
        around = {o % rows for o in range(-k, k + 1)}
        if around & {(o + rows // 2) % rows for o in range(-k, k + 1)}:
            with pytest.raises(ValueError, match="context_size: want"):
                fastqt.curl_block_loss(*inputs, context_size=k)
        else:
            assert fastqt.curl_block_loss(*inputs, context_size=k).isfinite()


def test_a_block_bounds_its_pairs():
    """softplus is convex: the loss of the means is at most the mean of the losses."""
    for seed in range(20):
        f, positives, negatives = (x.detach() for x in views(1, K, K, seed=seed))
        block = fastqt.curl_loss(f, positives.mean(0, keepdim=True), negatives.mean(0, keepdim=True))
        assert block <= fastqt.curl_loss(f.expand(K, D), positives, negatives)


def test_altered_targets_bound_a_block():
    """With K positives and K negatives, -f mu+ + log sum exp - log K is at least the block's loss."""
    for seed in range(20):
        f, positives, negatives = (x.detach() for x in views(1, K, K, seed=seed))
        candidates = torch.cat([positives, negatives])
        targets = torch.tensor([[1 / K] * K + [0.0] * K], dtype=torch.float64)
        # The KL divergence is the altered loss less log K, as the targets' entropy is log K.
        altered = fastqt.contrastive_loss(f, candidates, targets, diagonal="keep")
        explicit = -f @ positives.mean(0) + (candidates @ f[0]).logsumexp(0) - math.log(K)
        assert relative(altered, explicit) < FLOAT64
        block = fastqt.curl_loss(f, positives.mean(0, keepdim=True), negatives.mean(0, keepdim=True))
        assert altered >= block
