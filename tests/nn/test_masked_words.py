"""Masked words have the rates of BERT's recipe, and the head's loss is its definition in numpy float64."""

import math

import numpy as np
import pytest
import torch

from fastqt.nn import BagOfWords, MaskedWordHead, MixCSE, SimCSE, Transformer, mask_words

V, MASK = 50, 50
KEPT = (0, 7)


def masked(B=40_000, L=30):
    torch.manual_seed(0)
    tokens, lengths = torch.randint(V, (B, L)), torch.randint(L + 1, (B,))
    return tokens, lengths, mask_words(tokens, lengths, vocab_size=V, mask_id=MASK, kept=KEPT)


def near(share: float, p: float, n: int) -> bool:
    """Whether a frequency in n draws is within five standard deviations of its probability p."""
    return abs(float(share) - p) < 5 * math.sqrt(p * (1 - p) / n)


def test_words_are_masked_at_the_rates_of_the_recipe():
    tokens, lengths, (changed, chosen) = masked()
    inside = torch.arange(tokens.shape[1]) < lengths[:, None]
    kept = (tokens == KEPT[0]) | (tokens == KEPT[1])
    assert not chosen[~inside | kept].any()
    assert torch.equal(changed[~chosen], tokens[~chosen])
    n = int((inside & ~kept).sum())
    assert near(chosen.sum() / n, 0.15, n)
    before, after = tokens[chosen], changed[chosen]
    assert near((after == MASK).double().mean(), 0.8, len(before))
    assert near((after == before).double().mean(), 0.1 + 0.1 / V, len(before))
    words = after[(after != MASK) & (after != before)]
    assert near(len(words) / len(before), 0.1 * (1 - 1 / V), len(before))
    # Random words are spread evenly over all ids, whatever stood there.
    counts = torch.bincount(words, minlength=V)
    assert len(counts) == V
    assert all(near(count / len(words), 1 / V, len(words)) for count in counts)


def test_the_mask_is_drawn_by_the_default_generator():
    first, again = masked(B=9)[2], masked(B=9)[2]
    assert all(map(torch.equal, first, again))


def loss_by_definition(states, table, words, head):
    """The head's loss in float64; erf gives the exact GELU."""
    x = states @ head["dense.weight"].T + head["dense.bias"]
    x = x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2
    x = x - x.mean(axis=1, keepdims=True)
    x = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + 1e-12)
    logits = (x * head["norm.weight"] + head["norm.bias"]) @ table.T + head["bias"]
    return sum(np.log(np.exp(row).sum()) - row[word] for row, word in zip(logits, words, strict=True))


@pytest.mark.parametrize("spread", [1.0, 1e-3])
def test_value_and_gradients_are_those_of_the_definition(spread):
    """Also where the states of all words are nearly equal."""
    torch.manual_seed(1)
    head = MaskedWordHead(11, 6).double()
    with torch.no_grad():  # moves biases and the norm away from 0 and 1, so that errors in them show
        for parameter in head.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    states = torch.randn(1, 6, dtype=torch.float64) + spread * torch.randn(5, 6, dtype=torch.float64)
    table, words = torch.randn(11, 6, dtype=torch.float64), torch.tensor([3, 0, 10, 3, 7])
    leaves = {"states": states, "table": table, **dict(head.named_parameters())}
    for leaf in leaves.values():
        leaf.requires_grad_()
    loss = head(states, table, words)
    arrays = {name: leaf.detach().numpy().copy() for name, leaf in leaves.items()}

    def definition():
        own = {name: each for name, each in arrays.items() if name not in ("states", "table")}
        return loss_by_definition(arrays["states"], arrays["table"], words.tolist(), own)

    assert loss.item() == pytest.approx(definition(), rel=1e-12)
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    for (name, array), gradient in zip(arrays.items(), gradients, strict=True):
        found = np.empty_like(array)
        for place in np.ndindex(array.shape):
            value = array[place]
            sides = []
            for step in (1e-5, -1e-5):
                array[place] = value + step
                sides.append(definition())
            array[place] = value
            found[place] = (sides[0] - sides[1]) / 2e-5
        # Central differences are off by about 1e-10 of the third derivative.
        np.testing.assert_allclose(gradient.numpy(), found, atol=1e-7 * np.abs(found).max(), err_msg=name)


@pytest.mark.parametrize("pooling", ["mean", "first"])
def test_the_loss_is_of_the_states_of_chosen_words(pooling):
    torch.manual_seed(2)
    encoder = Transformer(V + 1, 12, layers=1, heads=3, feedforward=8, dropout=0.0, pooling=pooling)
    model = MixCSE(encoder, head=MaskedWordHead(V + 1, 12)).double()
    tokens, lengths = torch.randint(V, (6, 9)), torch.tensor([9, 3, 0, 5, 1, 9])
    masking = mask_words(tokens, lengths, vocab_size=V, mask_id=MASK)
    expected, table = 0.0, encoder.embedding.weight
    head = {name: each.detach().numpy() for name, each in model.head.state_dict().items()}
    for row, length in enumerate(lengths.tolist()):
        own = masking.chosen[row, :length]
        if own.any():
            alone = encoder.states(masking.tokens[row : row + 1], lengths[row : row + 1])[own]
            words = tokens[row, :length][own].tolist()
            expected += loss_by_definition(alone.detach().numpy(), table.detach().numpy(), words, head)
    assert int(masking.chosen.sum()) > 2
    assert model.masked_word_loss(tokens, lengths, masking).item() == pytest.approx(expected, rel=1e-10)
    if pooling == "mean":
        means = torch.stack(
            [each.mean(0) for each in encoder.states(tokens, lengths).split(lengths.tolist())]
        )
        vectors = encoder(tokens, lengths)
        assert torch.allclose(vectors[lengths > 0], means[lengths > 0], rtol=1e-12)


def test_no_chosen_word_gives_gradients_of_0():
    head, states, table = MaskedWordHead(5, 4), torch.zeros(0, 4, requires_grad=True), torch.ones(5, 4)
    table.requires_grad_()
    loss = head(states, table, torch.zeros(0, dtype=torch.long))
    leaves = (states, table, *head.parameters())
    assert loss == 0
    assert all(not each.any() for each in torch.autograd.grad(loss, leaves))


def test_what_cannot_be_predicted_is_refused():
    with pytest.raises(TypeError, match="head: want None with a BagOfWords, which has no states of tokens"):
        SimCSE(BagOfWords(9, 8), head=MaskedWordHead(9, 8))
    tokens, lengths = torch.ones(1, 2, dtype=torch.long), torch.tensor([2])
    masking = mask_words(tokens, lengths, vocab_size=5, mask_id=5)
    model = SimCSE(Transformer(6, 4, layers=1, heads=1, feedforward=4))
    with pytest.raises(ValueError, match="head: want one that predicts masked words, got None"):
        model.masked_word_loss(tokens, lengths, masking)
    with pytest.raises(ValueError, match="vocab_size: want"):
        mask_words(tokens, lengths, vocab_size=0, mask_id=5)
