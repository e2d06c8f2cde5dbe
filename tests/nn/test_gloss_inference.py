"""Inference of GLOSS's latent vectors: projected gradient descent whose result no batch changes."""

from itertools import pairwise

import pytest
import torch

from fastqt.nn import Gloss, gloss_inference
from fastqt.nn.gloss_inference import CPU_ROWS, Inference
from tests.shared.gloss_oracle import Oracle
from tests.shared.small_gloss import DECODERS, L, N, model, sentences
from tests.shared.tolerances import FLOAT64, relative


@pytest.mark.parametrize("decoder", DECODERS)
def test_inference_is_projected_gradient_descent(decoder):
    gloss, (tokens, lengths) = model(decoder, sentences=0, radius=1.0), sentences()
    start = gloss.infer(tokens, lengths, steps=0)
    oracle = Oracle(gloss)

    def after_seven(**options):
        return gloss.infer(tokens, lengths, steps=7, learning_rate=0.2, **options)

    seven = after_seven()
    assert relative(seven, oracle.descend(start.numpy(), tokens.numpy(), lengths.numpy(), 7, 0.2)) < FLOAT64
    assert torch.equal(after_seven(safeguard=False), seven)  # no step overshoots
    losses = [gloss.loss(z, tokens, lengths, reduction="none") for z in (start, seven)]
    moved = gloss.decoder == "bow" or lengths > 0
    assert ((losses[1] < losses[0]) | ~torch.as_tensor(moved)).all()


@pytest.mark.parametrize("decoder", DECODERS)
def test_overshooting_steps_are_undone(decoder):
    gloss, (tokens, lengths) = model(decoder, sentences=0), sentences()
    with torch.no_grad():
        gloss.weight *= 8
    start = gloss.infer(tokens, lengths, steps=0)
    oracle = Oracle(gloss)
    data = tokens.numpy(), lengths.numpy()
    for safeguard, steps in ((False, 2), (True, 5)):  # few steps, because long ones amplify rounding errors
        found = gloss.infer(tokens, lengths, steps=steps, safeguard=safeguard)
        wanted = oracle.descend(start.numpy(), *data, steps, 1.0, safeguard=safeguard)
        assert relative(found, wanted) < 1e2 * FLOAT64
    losses = [
        gloss.loss(gloss.infer(tokens, lengths, steps=steps), tokens, lengths, reduction="none")
        for steps in range(0, 24, 3)
    ]
    for before, after in pairwise(losses):
        assert (after <= before * (1 + FLOAT64)).all()
    wild = gloss.infer(tokens, lengths, steps=21, safeguard=False)
    assert gloss.loss(wild, tokens, lengths) > 2 * losses[-1].mean()


@pytest.mark.parametrize("decoder", DECODERS)
def test_inference_changes_no_state(decoder):
    gloss, (tokens, lengths) = model(decoder), sentences()
    before = {name: value.clone() for name, value in gloss.state_dict().items()}
    state = torch.get_rng_state()
    with torch.inference_mode():
        within = gloss.infer(tokens.clone(), lengths.clone(), steps=3)
    assert torch.equal(within, gloss.infer(tokens, lengths, steps=3))
    assert not within.requires_grad
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in gloss.state_dict().items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in gloss.parameters())


@pytest.mark.parametrize("decoder", DECODERS)
def test_initial_latents_of_inference_depend_on_seed_and_sentence(decoder):
    gloss, (tokens, lengths) = model(decoder, sentences=0, radius=0.5), sentences()
    begin = gloss.infer(tokens, lengths, steps=0)
    torch.testing.assert_close(begin.norm(dim=1), torch.full((N,), 0.5).double())
    other = gloss.infer(tokens, lengths, steps=0, seed=1)
    pairs = torch.cdist(torch.cat([begin, other]), torch.cat([begin, other])).fill_diagonal_(1)
    assert (pairs > 0.01).all()
    padded = torch.nn.functional.pad(tokens, (0, 3), value=5)
    if decoder == "bow":
        assert torch.equal(gloss.infer(padded, lengths, steps=0), begin)
        turned = tokens.where(torch.arange(L) >= lengths[:, None], tokens.flip(1).sort(1).values)
        order = torch.tensor([2, 1, 0])
        assert torch.equal(
            gloss.infer(turned[:, order], torch.full((N,), 3)),
            gloss.infer(turned[:, :3], torch.full((N,), 3)),
        )


WIDE, LONG = 300, 40  # of the vocabulary and of the longest sentence, so that a product has many terms


def wide_model(decoder):
    """In float32, with weights so large that most steps overshoot, which enlarges any difference."""
    torch.manual_seed(3)
    gloss = Gloss(WIDE, 24, decoder=decoder, max_length=LONG)
    with torch.no_grad():
        gloss.weight *= 8
    return gloss


def wide_sentences(count):
    """Sentences of 0 to LONG words, in which the first and the last are the same."""
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(0, WIDE, (count, LONG), generator=generator)
    lengths = torch.randint(0, LONG + 1, (count,), generator=generator)
    lengths[:3] = torch.tensor([9, 0, LONG])
    tokens[-1], lengths[-1] = tokens[0], lengths[0]
    return tokens, lengths


@pytest.mark.parametrize("safeguard", [True, False])
@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.thinned(2)
def test_a_sentence_has_the_same_bits_in_every_batch(decoder, safeguard):
    """Alone, in batches of any size and order, beside itself, and padded to the length of others."""
    gloss, (tokens, lengths) = wide_model(decoder), wide_sentences(5 * CPU_ROWS + 7)

    def inferred(rows):
        longest = int(lengths[rows].max())  # as batches are padded
        return gloss.infer(tokens[rows, :longest], lengths[rows], steps=40, safeguard=safeguard)

    together = inferred(torch.arange(len(tokens)))
    assert torch.equal(together[0], together[-1])
    order = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(5))
    assert torch.equal(inferred(order), together[order])
    for rows in (order[:1], order[3:5], order[: CPU_ROWS + 1], *torch.tensor([[0], [1], [2]])):
        assert torch.equal(inferred(rows), together[rows])


def test_a_sentence_beyond_the_factored_algorithm_changes_no_other(monkeypatch):
    """Words below 6 pull z to where the scores of sentence and position are too far apart for products."""
    gloss = model("pos")
    with torch.no_grad():
        gloss.weight.mul_(0.1)
        gloss.weight[:6, 0] += 40
        gloss.weight[6:, 1] += 40
        gloss.positions.zero_()[:, 1] = 1.5
    tokens = torch.tensor([[7, 8, 9], [1, 2, 3], [8, 12, 1], [6, 6, 6]])
    lengths = torch.tensor([3, 3, 2, 1])
    asked, each = [], gloss_inference.factored_pos_loss

    def counted(*arguments, **options):
        asked.append(each(*arguments, **options) is None)
        return each(*arguments, **options)

    monkeypatch.setattr(gloss_inference, "factored_pos_loss", counted)
    together = gloss.infer(tokens, lengths, steps=30)
    beyond = []
    for row in range(len(tokens)):
        asked.clear()
        alone = gloss.infer(tokens[row, None], lengths[row, None], steps=30)
        assert torch.equal(alone[0], together[row])
        beyond.append(any(asked))
    assert beyond[1]
    assert not all(beyond)


def test_a_decoder_of_16_bits_is_inferred_in_float32():
    gloss, (tokens, lengths) = model("pos").bfloat16(), sentences()
    found = gloss.infer(tokens, lengths, steps=5)
    assert found.dtype is torch.bfloat16
    assert torch.equal(found, gloss.float().infer(tokens, lengths, steps=5).bfloat16())


def test_the_attribute_says_how_vectors_are_found():
    gloss, (tokens, lengths) = model("bow"), sentences()
    gloss.inference = Inference(steps=4, learning_rate=0.5, safeguard=False)
    wanted = gloss.infer(tokens, lengths, steps=4, learning_rate=0.5, safeguard=False)
    assert torch.equal(gloss.encode(tokens, lengths, normalize=False), wanted)
    assert not torch.equal(gloss.infer(tokens, lengths, steps=3), wanted)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"steps": -1}, ValueError, "steps: want at least 0, got -1"),
        ({"steps": 2.5}, TypeError, "steps: want an integer, got 2.5"),
        ({"learning_rate": 0.0}, ValueError, r"learning_rate: want a positive number, got 0\.0"),
        ({"safeguard": "no"}, TypeError, "safeguard: want True or False, got 'no'"),
    ],
)
def test_invalid_option_of_inference_raises(options, error, message):
    with pytest.raises(error, match=message):
        Inference(**options)
    with pytest.raises(error, match=message):
        model("bow").infer(*sentences(), **options)
