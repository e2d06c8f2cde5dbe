"""The GLOSS model: training steps, inference of latent vectors, and generation."""

import math
from itertools import chain

import numpy as np
import pytest
import torch
import torch.distributed as dist

import fastqt
from fastqt.nn import Gloss
from fastqt.sentences.train.optim import RowAdam, clip_gradients
from tests.shared.gloss_oracle import Oracle
from tests.shared.small_gloss import DECODERS, D, L, N, V, model, sentences
from tests.shared.tolerances import FLOAT64, relative


@pytest.mark.parametrize(("decoder", "position_loss"), [("bow", "sum"), ("pos", "sum"), ("pos", "mean")])
def test_training_steps_equal_a_numpy_implementation(decoder, position_loss):
    """Loss, gradient norm and parameters agree after each step of clipping, row-wise Adam and projection."""
    gloss, (tokens, lengths) = model(decoder, radius=1.0, position_loss=position_loss), sentences()
    clip = 1.5 if position_loss == "sum" else 0.32  # some gradients are longer, and some shorter
    oracle = Oracle(gloss, lr=0.1, clip=clip)
    optimizer = RowAdam(gloss.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(2)
    for _ in range(6):
        rows = torch.randperm(N, generator=generator)[:4]
        loss = gloss(rows, tokens[rows], lengths[rows])
        loss.backward()
        norm = clip_gradients(gloss.parameters(), clip)
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
def test_loss_equals_the_loss_function(decoder):
    gloss, (tokens, lengths) = model(decoder), sentences()
    if decoder == "pos":
        wanted = fastqt.gloss_pos_loss(
            gloss.latents, gloss.positions, gloss.weight, gloss.bias, tokens, lengths, reduction="none"
        )
    else:
        words = [[w for w in s[:n] if w] for s, n in zip(tokens.tolist(), lengths.tolist(), strict=True)]
        offsets = torch.tensor([0, *map(len, words)]).cumsum(0)[:-1]
        wanted = fastqt.gloss_bow_loss(
            gloss.latents,
            gloss.weight,
            gloss.bias,
            torch.tensor(list(chain(*words))),
            offsets,
            reduction="none",
        )
    ours = gloss.loss(gloss.latents, tokens, lengths, reduction="none")
    assert torch.equal(ours, wanted)
    for reduction in ("mean", "sum"):
        loss = gloss(torch.arange(N), tokens, lengths, reduction=reduction)
        assert relative(loss, getattr(wanted, reduction)()) < FLOAT64


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


@pytest.mark.parametrize("decoder", DECODERS)
def test_only_latents_of_the_batch_get_gradients(decoder):
    gloss, (tokens, lengths) = model(decoder), sentences()
    rows = torch.tensor([5, 2])
    gloss(rows, tokens[rows], lengths[rows]).backward()
    assert gloss.latents.grad.is_sparse
    assert gloss.latents.grad._indices()[0].tolist() == [5, 2]


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


@pytest.mark.parametrize("decoder", DECODERS)
def test_memorised_sentences_are_reconstructed(decoder):
    """After overfitting a small corpus, trained and inferred latents both decode to the sentences."""
    torch.manual_seed(4)
    gloss = Gloss(40, 24, decoder=decoder, max_length=L, sentences=12)
    tokens = torch.stack([torch.randperm(39)[:L] + 1 for _ in range(12)])
    lengths = torch.tensor([L, L - 1, L - 2] * 4)
    tokens[torch.arange(L) >= lengths[:, None]] = 0
    optimizer = RowAdam(gloss.parameters(), lr=0.03)
    for _ in range(100):
        gloss(torch.arange(12), tokens, lengths).backward()
        clip_gradients(gloss.parameters(), 25)
        optimizer.step()
        optimizer.zero_grad()
        gloss.project()
    start, found = (gloss.infer(tokens, lengths, steps=steps) for steps in (0, 250))
    losses = [gloss.loss(z, tokens, lengths, reduction="none") for z in (start, found, gloss.latents)]
    assert (losses[1] < losses[0] / 5).all()
    assert losses[1].mean() < 1.1 * losses[2].mean()
    for latents in (found, gloss.latents.detach()):
        words = gloss.generate(latents, lengths)
        if decoder == "bow":
            words, tokens = words.sort(1).values, tokens.sort(1).values
        assert torch.equal(words, tokens)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decoder": "lstm"}, "decoder: want one of 'bow', 'pos', got 'lstm'"),
        ({"dim": 0}, "dim: want at least 1, got 0"),
        ({"sentences": -1}, "sentences: want at least 0, got -1"),
        ({"radius": 0.0}, r"radius: want a positive number, got 0\.0"),
        ({"radius": math.inf}, "radius: want a finite number, got inf"),
        ({"position_loss": "max"}, "position_loss: want one of 'sum', 'mean', got 'max'"),
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
        (torch.zeros(2, 3).long(), torch.tensor([1]), r"lengths: want one in 0\.\.3 for each of B=2"),
        (torch.full((2, 3), V), torch.tensor([0, 1]), r"tokens: want integers in 0\.\.12, got 13\.\.13"),
        (torch.full((2, 3), -1), torch.tensor([0, 1]), r"tokens: want integers in 0\.\.12, got -1\.\.-1"),
        (torch.zeros(3).long(), torch.tensor([1]), r"tokens: want shape \(B, L\), L at most"),
    ],
)
def test_invalid_sentence_raises(decoder, tokens, lengths, message):
    gloss = model(decoder)
    for call in (gloss.infer, lambda *data: gloss(torch.tensor([0, 1]), *data)):
        with pytest.raises(ValueError, match=message):
            call(tokens, lengths)


def test_scores_beyond_the_range_of_the_factored_algorithm():
    """The factored algorithm would underflow for such scores, so the loss computes each score."""
    gloss, (tokens, lengths) = model("pos"), sentences()
    with torch.no_grad():
        gloss.weight.zero_()[:6, 0] = gloss.weight[6:, 1] = 200
        gloss.positions.zero_()[:, 1] = 1
        gloss.latents.zero_()[:, 0] = 1
    rows = gloss.loss(gloss.latents, tokens, lengths, reduction="none")
    assert rows.isfinite().all()
    assert relative(gloss(torch.arange(N), tokens, lengths), rows.mean()) < FLOAT64


def test_repr():
    assert repr(model("pos", position_loss="mean")).endswith("radius=2.0, position_loss='mean')")
    assert repr(model("pos")) == "Gloss(13, 5, sentences=7, decoder='pos', max_length=6, radius=2.0)"
    assert np.isclose(float(model("bow").radius), 2)
