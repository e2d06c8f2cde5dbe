"""GLOSS's losses equal their definitions, written out with whole matrices, in value and gradients."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fastqt
from fastqt.nn import Gloss
from tests.shared.gloss_oracle import Oracle
from tests.shared.loss_views import by_backend, by_memory, check, views
from tests.shared.tolerances import FLOAT64, relative


@by_backend
@by_memory
def test_gloss_bow(backend, memory):
    V = 11
    latents, weight = views(4, V)
    bias = torch.randn(V, dtype=torch.float64, requires_grad=True)
    token_ids, offsets = torch.tensor([3, 1, 3, 10, 0, 7, 7]), torch.tensor([0, 4, 4, 6])
    words = [{3, 1, 10}, set(), {0, 7}, {7}]
    T = torch.tensor([[float(v in named) for v in range(V)] for named in words], dtype=torch.float64)
    expected = F.binary_cross_entropy_with_logits(latents @ weight.T + bias, T, reduction="none").sum(1)
    inputs = [latents, weight, bias]
    options = {"backend": backend, "memory": memory}
    rows = fastqt.gloss_bow_loss(*inputs, token_ids, offsets, reduction="none", **options)
    check(rows, expected, inputs)
    check(fastqt.gloss_bow_loss(*inputs, token_ids, offsets, **options), expected.mean(), inputs)


@by_backend
@by_memory
def test_gloss_pos(backend, memory):
    V, L = 11, 5
    latents, positions, weight = views(4, L, V)
    bias = torch.randn(V, dtype=torch.float64, requires_grad=True)
    token_ids, lengths = torch.randint(0, V, (4, L)), torch.tensor([3, 0, 5, 1])
    expected = []
    for b in range(4):
        logits = (latents[b] + positions[: lengths[b]]) @ weight.T + bias
        expected.append(F.cross_entropy(logits, token_ids[b, : lengths[b]], reduction="sum"))
    expected = torch.stack(expected)
    inputs = [latents, positions, weight, bias]
    token_ids = token_ids.where(torch.arange(L) < lengths[:, None], -1)  # padding may be anything
    options = {"backend": backend, "memory": memory}
    rows = fastqt.gloss_pos_loss(*inputs, token_ids, lengths, reduction="none", **options)
    check(rows, expected, inputs)
    check(fastqt.gloss_pos_loss(*inputs, token_ids, lengths, **options), expected.mean(), inputs)
    check(
        fastqt.gloss_pos_loss(*inputs, token_ids, lengths, reduction="sum", **options), expected.sum(), inputs
    )
    assert fastqt.gloss_pos_loss(*inputs, token_ids, lengths * 0) == 0


@pytest.mark.parametrize("backend", [None, "cpu", "torch", "reference"])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_gloss_pos_of_the_mean_over_positions(backend, reduction):
    """Value and gradients equal those of numpy, which scores each word; a sentence without words costs 0."""
    torch.manual_seed(2)
    gloss = Gloss(11, 4, sentences=5, decoder="pos", max_length=5, position_loss="mean").double()
    tokens, lengths = torch.randint(0, 11, (5, 5)), torch.tensor([3, 0, 5, 1, 2])
    parameters = dict(gloss.named_parameters())
    oracle = Oracle(gloss)
    inputs = [parameters[name] for name in ("latents", "positions", "weight", "bias")]
    loss = fastqt.gloss_pos_loss(
        *inputs, tokens, lengths, position_loss="mean", reduction=reduction, backend=backend
    )
    weights = np.array([0.5, -1, 2, 3, 0.25]) if reduction == "none" else np.ones(5)
    if reduction == "mean":
        weights /= 5
    rows, wanted = np.zeros(5), dict.fromkeys(parameters, 0.0)
    for i, weight in enumerate(weights):
        own = slice(i, i + 1)
        rows[i], of_row = oracle.loss_and_gradients(
            oracle.values["latents"][own], tokens[own].numpy(), lengths[own].numpy()
        )
        of_row["latents"] = np.eye(5)[i][:, None] * of_row["latents"]
        wanted = {name: value + weight * of_row[name] for name, value in wanted.items()}
    assert relative(loss, rows if reduction == "none" else weights @ rows) < FLOAT64
    assert rows[1] == 0
    names = ("latents", "positions", "weight", "bias")
    found = torch.autograd.grad(
        (loss * torch.from_numpy(weights)).sum() if reduction == "none" else loss, inputs
    )
    for name, gradient in zip(names, found, strict=True):
        assert relative(gradient, wanted[name]) < FLOAT64, name


def test_a_wrong_position_loss_is_refused():
    x, ids = torch.ones(2, 3), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="position_loss: want one of 'sum', 'mean', got 'max'"):
        fastqt.gloss_pos_loss(x, x[:1], x, x[:, 0], ids[:, None], ids, position_loss="max")
