"""The loss module is the function with its options fixed."""

import pytest
import torch

import fastqt
from fastqt.nn import ContrastiveLoss

QUERIES, CANDIDATES = torch.randn(9, 4), torch.randn(9, 4)


def test_equals_the_function():
    module = ContrastiveLoss(context_size=2, scale=3.0, normalize=True, reduction="none")
    ids = torch.arange(9) // 5
    expected = fastqt.contrastive_loss(
        QUERIES, CANDIDATES, context_size=2, scale=3.0, normalize=True, reduction="none", document_ids=ids
    )
    assert torch.equal(module(QUERIES, CANDIDATES, document_ids=ids), expected)
    assert not list(module.parameters())
    assert repr(module) == "ContrastiveLoss(scale=3.0, context_size=2, normalize=True, reduction='none')"


def test_learns_its_scale():
    """Queries that already are their candidates: only a larger scale lowers the loss."""
    module = ContrastiveLoss(scale=2.0, learn_scale=True, diagonal="keep", normalize=True)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = module(QUERIES, QUERIES, fastqt.Diagonal())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    assert module.scale > 2.5
    assert list(module.state_dict()) == ["log_scale"]


def test_refuses():
    with pytest.raises(TypeError, match="temperature: no option"):
        ContrastiveLoss(temperature=0.05)
    with pytest.raises(ValueError, match="scale: want a positive number"):
        ContrastiveLoss(scale=-1.0, learn_scale=True)
    with pytest.raises(ValueError, match="scale: want a finite number"):
        ContrastiveLoss(scale=float("inf"))
