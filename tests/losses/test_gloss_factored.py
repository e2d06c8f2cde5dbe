"""The factored positional loss equals the one that forms every score, in float64."""

import pytest
import torch
from torch.nn import functional as F

from fastqt import gloss_pos_loss
from fastqt.losses import gloss, gloss_factored
from tests.shared.tolerances import FLOAT32, FLOAT64, relative

B, L, V, D = 9, 5, 23, 6
LENGTHS = torch.tensor([5, 0, 3, 1, 5, 2, 4, 5, 3])


def inputs(dtype, spread=1.0):
    generator = torch.Generator().manual_seed(0)
    shapes = (B, D), (L, D), (V, D), (V,)
    parameters = [torch.randn(*shape, generator=generator).mul_(spread).to(dtype) for shape in shapes]
    tokens = torch.randint(0, V, (B, L), generator=generator)
    tokens[torch.arange(L) >= LENGTHS[:, None]] = -7  # padding may be anything
    return [x.requires_grad_() for x in parameters], tokens


def each_score(latents, positions, weight, bias, tokens, lengths=LENGTHS):
    """The losses of the sentences from all (B, L, V) scores."""
    logits = (latents[:, None] + positions) @ weight.T + bias
    within = torch.arange(L) < lengths[:, None]
    losses = logits.new_zeros(within.shape)
    losses[within] = F.cross_entropy(logits[within], tokens[within], reduction="none")
    return losses.sum(1)


@pytest.fixture(autouse=True)
def only_factored(monkeypatch):
    """The general loss, which forms each score, must not be what answers."""
    monkeypatch.setattr(gloss, "contrastive_loss", None)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("chunk", [1, 2**20])
@pytest.mark.parametrize("needs", [(0,), (1,), (2,), (3,), (0, 1, 2, 3)])
@pytest.mark.parametrize("position_loss", ["sum", "mean"])
def test_loss_and_gradients(monkeypatch, chunk, needs, reduction, position_loss):
    """In chunks of 16 sentences, the last one of them smaller, and in one chunk."""
    monkeypatch.setattr(gloss_factored, "CHUNK_BYTES", chunk)
    parameters, tokens = inputs(torch.float64)
    tokens, lengths = tokens.repeat(5, 1), LENGTHS.repeat(5)
    many = [torch.cat([parameters[0].detach() * k for k in range(1, 6)]).requires_grad_(), *parameters[1:]]
    rows = each_score(*many, tokens.clamp(min=0), lengths)
    if position_loss == "mean":
        rows = rows / lengths.clamp(min=1)
    wanted = {"mean": rows.mean(), "sum": rows.sum(), "none": rows}[reduction]
    given = [x if i in needs else x.detach() for i, x in enumerate(many)]
    loss = gloss_pos_loss(*given, tokens, lengths, reduction=reduction, position_loss=position_loss)
    assert relative(loss, wanted) < FLOAT64
    chosen = [many[i] for i in needs]
    upstream = torch.linspace(-1, 3, len(rows), dtype=torch.float64) if reduction == "none" else 3.0
    gradients = torch.autograd.grad((upstream * loss).sum(), chosen)
    for ours, theirs in zip(gradients, torch.autograd.grad((upstream * wanted).sum(), chosen), strict=True):
        assert relative(ours, theirs) < FLOAT64


def test_float32():
    parameters, tokens = inputs(torch.float32)
    doubles = [x.detach().double().requires_grad_() for x in parameters]
    loss = gloss_pos_loss(*parameters, tokens, LENGTHS, reduction="sum")
    wanted = each_score(*doubles, tokens.clamp(min=0)).sum()
    assert loss.dtype is torch.float32
    assert relative(loss, wanted) < FLOAT32
    for ours, theirs in zip(
        torch.autograd.grad(loss, parameters), torch.autograd.grad(wanted, doubles), strict=True
    ):
        assert relative(ours, theirs) < FLOAT32


def test_scores_far_apart_are_formed_one_by_one(monkeypatch):
    """Where every word that a sentence favours is one that a position rules out, and the reverse."""
    asked = []
    monkeypatch.setattr(gloss, "contrastive_loss", lambda *_, **__: asked.append(1) or torch.ones(()))
    (latents, positions, weight, bias), tokens = inputs(torch.float32)
    with torch.no_grad():
        latents.zero_()
        positions.zero_()
        weight.zero_()
        latents[:, 0] = positions[:, 1] = 1
        weight[:11, 0] = weight[11:, 1] = 50
    gloss_pos_loss(latents, positions, weight, bias, tokens, LENGTHS)
    assert not asked
    with torch.no_grad():
        weight *= 1.5
    gloss_pos_loss(latents, positions, weight, bias, tokens, LENGTHS)
    assert asked
    # A sentence without words has no scores to be lost.
    assert gloss_pos_loss(latents, positions, weight, bias, tokens, LENGTHS * 0) == 0


def test_no_second_derivative():
    parameters, tokens = inputs(torch.float64)
    with pytest.raises(RuntimeError, match="gloss_pos_loss is differentiable once"):
        torch.autograd.grad(gloss_pos_loss(*parameters, tokens, LENGTHS), parameters[0], create_graph=True)


def test_ids_outside_the_vocabulary_are_refused():
    parameters, tokens = inputs(torch.float64)
    tokens[0, 0] = V
    with pytest.raises(ValueError, match=r"token_ids: want integers in 0\.\.22, got \d+\.\.23"):
        gloss_pos_loss(*parameters, tokens, LENGTHS)
