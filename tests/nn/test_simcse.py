"""SimCSE and MixCSE: two views by dropout in training, one vector in evaluation."""

import pytest
import torch
from torch.nn import functional as F

import fastqt
from fastqt.nn import BagOfWords, GRUEncoder, MixCSE, SimCSE

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


def test_invalid_option_raises():
    with pytest.raises(ValueError, match=r"dropout: want a probability in \[0, 1\), got 1.0"):
        SimCSE(BagOfWords(9, 8), dropout=1.0)
    with pytest.raises(TypeError, match=r"^mix: no option of SimCSE$"):
        SimCSE(BagOfWords(9, 8), mix=0.2)
