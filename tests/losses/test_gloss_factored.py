"""The factored positional loss equals the one that forms every score, in float64."""

import pytest
import torch
from tolerances import FLOAT32, FLOAT64, relative
from torch.nn import functional as F

from fastqt.losses import gloss_factored as positional
from fastqt.losses.gloss_factored import positional_loss

B, L, V, D = 9, 5, 23, 6
LENGTHS = torch.tensor([5, 0, 3, 1, 5, 2, 4, 5, 3])


def inputs(dtype, spread=1.0):
    generator = torch.Generator().manual_seed(0)
    shapes = (B, D), (L, D), (V, D), (V,)
    parameters = [torch.randn(*shape, generator=generator).mul_(spread).to(dtype) for shape in shapes]
    tokens = torch.randint(0, V, (B, L), generator=generator)
    tokens[torch.arange(L) >= LENGTHS[:, None]] = -7  # padding may be anything
    return [x.requires_grad_() for x in parameters], tokens


def each_score(latents, positions, weight, bias, tokens):
    """The loss from all (B, L, V) scores."""
    logits = (latents[:, None] + positions) @ weight.T + bias
    within = torch.arange(L) < LENGTHS[:, None]
    return F.cross_entropy(logits[within], tokens[within], reduction="sum")


@pytest.mark.parametrize("chunk", [1, 2**20])
@pytest.mark.parametrize("needs", [(0,), (1,), (2,), (3,), (0, 1, 2, 3)])
def test_loss_and_gradients(monkeypatch, chunk, needs):
    """Sentences are computed in chunks of 16, the last of them smaller, or in one chunk."""
    monkeypatch.setattr(positional, "CHUNK_BYTES", chunk)
    parameters, tokens = inputs(torch.float64)
    tokens, lengths = tokens.repeat(5, 1), LENGTHS.repeat(5)
    many = [torch.cat([parameters[0].detach() * k for k in range(1, 6)]).requires_grad_(), *parameters[1:]]
    parts = zip(many[0].split(B), tokens.split(B), strict=True)
    wanted = sum(each_score(z, *many[1:], words) for z, words in parts)
    given = [x if i in needs else x.detach() for i, x in enumerate(many)]
    loss = positional_loss(*given, tokens, lengths)
    assert relative(loss, wanted) < FLOAT64
    chosen = [many[i] for i in needs]
    gradients = torch.autograd.grad(3 * loss, chosen)
    for ours, theirs in zip(gradients, torch.autograd.grad(3 * wanted, chosen), strict=True):
        assert relative(ours, theirs) < FLOAT64


def test_float32():
    parameters, tokens = inputs(torch.float32)
    doubles = [x.detach().double().requires_grad_() for x in parameters]
    loss, wanted = positional_loss(*parameters, tokens, LENGTHS), each_score(*doubles, tokens)
    assert loss.dtype is torch.float32
    assert relative(loss, wanted) < FLOAT32
    for ours, theirs in zip(
        torch.autograd.grad(loss, parameters), torch.autograd.grad(wanted, doubles), strict=True
    ):
        assert relative(ours, theirs) < FLOAT32


def test_scores_far_apart_are_computed_one_by_one():
    """Words that are likely by their sentence are unlikely by their place: the products underflow."""
    (latents, positions, weight, bias), tokens = inputs(torch.float32)
    with torch.no_grad():
        latents.zero_()
        positions.zero_()
        weight.zero_()
        latents[:, 0] = positions[:, 1] = 1
        weight[:11, 0] = weight[11:, 1] = 50
    assert positional_loss(latents, positions, weight, bias, tokens, LENGTHS) is not None
    with torch.no_grad():
        weight *= 1.5
    assert positional_loss(latents, positions, weight, bias, tokens, LENGTHS) is None
    # A sentence without words has no scores to be lost.
    assert positional_loss(latents, positions, weight, bias, tokens, LENGTHS * 0) == 0


def test_no_second_derivative():
    parameters, tokens = inputs(torch.float64)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(positional_loss(*parameters, tokens, LENGTHS), parameters[0], create_graph=True)
