"""SimCSE and MixCSE: two views by dropout in training, and masked words by the rates of BERT's recipe."""

import math

import pytest
import torch
from torch.nn import functional as F

import fastqt
from fastqt.nn import BagOfWords, GRUEncoder, MaskedWordHead, MixCSE, SimCSE, Transformer, mask_words
from tests.shared.tolerances import FLOAT64, relative

TOKENS, LENGTHS = torch.tensor([[1, 2, 3], [4, 5, 0], [6, 0, 0], [2, 2, 7]]), torch.tensor([3, 2, 1, 3])


def test_views_differ_only_by_dropout():
    model = SimCSE(BagOfWords(9, 2000), dropout=0.25)
    whole = model.encoder(TOKENS, LENGTHS)
    z1, z2 = model(TOKENS, LENGTHS)
    kept1, kept2 = z1 != 0, z2 != 0
    assert torch.allclose(z1[kept1], whole[kept1] / 0.75)
    # The masks are independent, so both keep a coordinate with probability 0.75².
    assert kept1.double().mean().item() == pytest.approx(0.75, abs=0.03)
    assert (kept1 & kept2).double().mean().item() == pytest.approx(0.75**2, abs=0.03)
    model.eval()
    z1, z2 = model(TOKENS, LENGTHS)
    assert torch.equal(z1, z2)
    assert torch.equal(z1, whole)


def test_encode_normalises_the_vector():
    model = MixCSE(GRUEncoder(9, 4, 6)).eval()
    assert model.embedding_dim == 6
    raw = model.encode(TOKENS, LENGTHS, normalize=False)
    assert torch.equal(raw, model.encoder(TOKENS, LENGTHS))
    assert torch.equal(model.encode(TOKENS, LENGTHS), F.normalize(raw, dim=1))
    assert not raw.requires_grad


def test_loss_takes_the_options_of_the_model():
    z1, z2 = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    encoder = BagOfWords(9, 8)
    assert SimCSE(encoder, scale=5.0).loss(z1, z2) == fastqt.simcse_loss(z1, z2, scale=5.0)
    released = MixCSE(encoder, mix=0.3, form="released").loss(z1, z2)
    assert released == fastqt.mixcse_loss(z1, z2, mix=0.3, form="released")


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
    """The head's loss; erf gives the exact GELU."""
    x = states @ head["dense.weight"].T + head["dense.bias"]
    x = x * (1 + torch.erf(x / math.sqrt(2))) / 2
    x = x - x.mean(1, keepdim=True)
    x = x / (x.square().mean(1, keepdim=True) + 1e-12).sqrt()
    logits = (x * head["norm.weight"] + head["norm.bias"]) @ table.T + head["bias"]
    return logits.exp().sum(1).log().sum() - logits[torch.arange(len(words)), words].sum()


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
    own = {name: x.detach().clone().requires_grad_() for name, x in leaves.items()}
    wanted = loss_by_definition(own["states"], own["table"], words, own)
    assert relative(loss, wanted) < FLOAT64
    gradients = [torch.autograd.grad(x, list(of.values())) for x, of in ((loss, leaves), (wanted, own))]
    for name, a, b in zip(leaves, *gradients, strict=True):
        assert relative(a, b) < 1e2 * FLOAT64, name


@pytest.mark.parametrize("pooling", ["mean", "first"])
def test_the_loss_is_of_the_states_of_chosen_words(pooling):
    torch.manual_seed(2)
    encoder = Transformer(V + 1, 12, layers=1, heads=3, feedforward=8, dropout=0.0, pooling=pooling)
    model = MixCSE(encoder, head=MaskedWordHead(V + 1, 12)).double()
    tokens, lengths = torch.randint(V, (6, 9)), torch.tensor([9, 3, 0, 5, 1, 9])
    masking = mask_words(tokens, lengths, vocab_size=V, mask_id=MASK)
    expected, table = 0.0, encoder.embedding.weight
    head = model.head.state_dict()
    for row, length in enumerate(lengths.tolist()):
        own = masking.chosen[row, :length]
        if own.any():
            alone = encoder.states(masking.tokens[row : row + 1], lengths[row : row + 1])[own]
            words = tokens[row, :length][own]
            expected += loss_by_definition(alone, table, words, head).item()
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
    with pytest.raises(ValueError, match=r"dropout: want a probability in \[0, 1\), got 1.0"):
        SimCSE(BagOfWords(9, 8), dropout=1.0)
    with pytest.raises(TypeError, match="head: want None with a BagOfWords, which has no states of tokens"):
        SimCSE(BagOfWords(9, 8), head=MaskedWordHead(9, 8))
    tokens, lengths = torch.ones(1, 2, dtype=torch.long), torch.tensor([2])
    masking = mask_words(tokens, lengths, vocab_size=5, mask_id=5)
    model = SimCSE(Transformer(6, 4, layers=1, heads=1, feedforward=4))
    with pytest.raises(ValueError, match="head: want one that predicts masked words, got None"):
        model.masked_word_loss(tokens, lengths, masking)
    with pytest.raises(ValueError, match="vocab_size: want"):
        mask_words(tokens, lengths, vocab_size=0, mask_id=5)
