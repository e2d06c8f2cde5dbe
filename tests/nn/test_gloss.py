"""The GLOSS model: training steps, inference of latent vectors, and generation."""

import math

import pytest
import torch
import torch.distributed as dist

from fastqt.nn import Gloss
from fastqt.optim import Adam, clip_grad_norm_
from tests.shared.gloss_oracle import Oracle
from tests.shared.small_gloss import DECODERS, D, L, N, V, model, sentences
from tests.shared.tolerances import FLOAT64, relative


@pytest.mark.parametrize(("decoder", "position_loss"), [("bow", "sum"), ("pos", "sum"), ("pos", "mean")])
def test_training_steps_equal_a_numpy_implementation(decoder, position_loss):
    """Loss, gradient norm and parameters agree after each step of clipping, row-wise Adam and projection."""
    gloss, (tokens, lengths) = model(decoder, radius=1.0, position_loss=position_loss), sentences()
    clip = 1.5 if position_loss == "sum" else 0.32  # some gradients are longer, and some shorter
    oracle = Oracle(gloss, lr=0.1, clip=clip)
    optimizer = Adam(gloss.parameters(), lr=0.1, rows="touched")
    generator = torch.Generator().manual_seed(2)
    for _ in range(6):
        rows = torch.randperm(N, generator=generator)[:4]
        loss = gloss(rows, tokens[rows], lengths[rows])
        loss.backward()
        norm = clip_grad_norm_(gloss.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        gloss.project(rows)
        wanted_loss, wanted_norm = oracle.step(rows.numpy(), tokens[rows].numpy(), lengths[rows].numpy())
        assert relative(loss, wanted_loss) < FLOAT64
        assert relative(norm, wanted_norm) < FLOAT64
        for name, parameter in gloss.named_parameters():
            assert relative(parameter, oracle.values[name]) < FLOAT64, name
    assert oracle.clipped == {False, True}
    assert oracle.projected


@pytest.mark.parametrize("decoder", DECODERS)
def test_loss_takes_a_group(decoder):
    """A group of this process alone; several are tested with the loss functions."""
    options = {"position_loss": "mean"} if decoder == "pos" else {}
    gloss, (tokens, lengths) = model(decoder, **options), sentences()
    alone = gloss(torch.arange(N), tokens, lengths)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        loss = gloss(torch.arange(N), tokens, lengths, group=dist.group.WORLD)
        loss.backward()
        with pytest.raises(TypeError, match="group: want a Group, a ProcessGroup or a DeviceMesh, got str"):
            gloss(torch.arange(N), tokens, lengths, group="all")
    finally:
        dist.destroy_process_group()
    assert relative(loss, alone) < FLOAT64
    assert all(parameter.grad is not None for parameter in gloss.parameters())


def test_initial_latents_are_in_the_ball():
    """Nearly all draws from N(0, I) lie outside the ball: projection gives norm r and random directions."""
    gloss = Gloss(V, 64, sentences=4000, radius=1.5)
    torch.testing.assert_close(gloss.latents.norm(dim=1), torch.full((4000,), 1.5))
    assert gloss.latents.mean(0).norm() < 1.5 * 4 / math.sqrt(4000)


def test_projection_scales_only_latents_outside_the_ball():
    gloss = model("bow")
    inside, outside = (
        torch.tensor([0.3, 0, -1.2, 0.1, 1.0]).double(),
        torch.tensor([3.0, 0, 4, 0, 0]).double(),
    )
    with torch.no_grad():
        gloss.latents.copy_(torch.stack([inside, outside, outside, inside * 0, *[outside * 7] * 3]))
    gloss.project(torch.tensor([2, 0]))
    assert torch.equal(gloss.latents[:2], torch.stack([inside, outside]))
    torch.testing.assert_close(gloss.latents[2], outside * 2 / 5)
    gloss.project()
    assert torch.equal(gloss.latents[[0, 3]], torch.stack([inside, inside * 0]))
    torch.testing.assert_close(gloss.latents[[1, 2, 4, 5, 6]].norm(dim=1), torch.full((5,), 2.0).double())


def test_generation_takes_the_most_probable_words():
    gloss, (_, lengths) = model("pos"), sentences()
    latents = gloss.latents.detach()
    words = gloss.generate(latents, lengths)
    assert words.shape == (N, lengths.max())
    for b in range(N):
        for place in range(words.shape[1]):
            scores = gloss.weight @ (latents[b] + gloss.positions[place]) + gloss.bias
            assert words[b, place] == (scores.argmax() if place < lengths[b] else 0)

    gloss = model("bow")
    with torch.no_grad():
        gloss.bias[0] = 10  # would be the most probable word if the unknown id were predicted
    words = gloss.generate(latents, lengths)
    scores = (latents @ gloss.weight.T + gloss.bias)[:, 1:]
    for b in range(N):
        wanted = scores[b].argsort(descending=True)[: lengths[b]] + 1
        assert words[b].tolist() == wanted.tolist() + [0] * (words.shape[1] - len(wanted))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decoder": "lstm"}, "decoder: want one of 'bow', 'pos', got 'lstm'"),
        ({"sentences": -1}, "sentences: want at least 0, got -1"),
        ({"radius": 0.0}, r"radius: want a positive number, got 0\.0"),
        ({"position_loss": "mean"}, "position_loss: want 'sum' for the decoder 'bow', got 'mean'"),
    ],
)
def test_invalid_option_raises(options, message):
    with pytest.raises(ValueError, match=message):
        Gloss(**{"vocab_size": V, "dim": D} | options)


def test_too_long_sentence_raises():
    gloss = model("pos")
    tokens = torch.zeros(2, L + 1, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"tokens: want shape \(B, L\), L at most 6, got \(2, 7\)"):
        gloss(torch.tensor([3, 4]), tokens, torch.tensor([1, 2]))


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize(
    ("tokens", "lengths", "message"),
    [
        (torch.zeros(2, 3).long(), torch.tensor([1, 4]), r"lengths: want one in 0\.\.3 for each of B=2"),
        (torch.full((2, 3), V), torch.tensor([0, 1]), r"tokens: want integers in 0\.\.12, got 13\.\.13"),
        (torch.zeros(3).long(), torch.tensor([1]), r"tokens: want shape \(B, L\), L at most"),
    ],
)
def test_invalid_sentence_raises(decoder, tokens, lengths, message):
    gloss = model(decoder)
    for call in (gloss.infer, lambda *data: gloss(torch.tensor([0, 1]), *data)):
        with pytest.raises(ValueError, match=message):
            call(tokens, lengths)
