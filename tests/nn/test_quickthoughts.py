"""The QuickThoughts model of two encoders."""

import numpy as np
import pytest
import torch

from fastqt.nn import BagOfWords, CombinedQuickThoughts, GRUEncoder, QuickThoughts

TOKENS = torch.tensor([[1, 2, 3], [4, 5, 0], [6, 0, 0], [0, 0, 0]])
LENGTHS = torch.tensor([3, 2, 1, 0])


def model() -> QuickThoughts:
    torch.manual_seed(0)
    return QuickThoughts(GRUEncoder(10, 4, 6), GRUEncoder(10, 4, 6))


def test_encode_concatenates_both_vectors():
    qt = model()
    halves = qt(TOKENS, LENGTHS)
    raw = qt.encode(TOKENS, LENGTHS, normalize=False)
    assert torch.equal(raw, torch.cat(halves, dim=1))
    unit = qt.encode(TOKENS, LENGTHS)
    assert unit.shape == (4, qt.embedding_dim) == (4, 12)
    assert not unit.requires_grad
    for half, wanted in zip(unit.chunk(2, dim=1), halves, strict=True):
        torch.testing.assert_close(half[:3].norm(dim=1), torch.ones(3))
        torch.testing.assert_close(half[:3] * wanted[:3].norm(dim=1, keepdim=True), wanted[:3])
        assert (half[3] == 0).all()  # an empty sentence


def test_encoders_of_different_width_raise():
    with pytest.raises(ValueError, match=r"candidate_encoder: want query_encoder's embedding_dim, 3, got 4"):
        QuickThoughts(BagOfWords(10, 3), BagOfWords(10, 4))


def test_models_that_are_trained_apart_are_joined_by_normalised_halves():
    one = model()
    other = QuickThoughts(BagOfWords(10, 3), BagOfWords(10, 3))
    both = CombinedQuickThoughts(one, other)
    assert both.embedding_dim == 2 * 6 + 2 * 3
    queries, candidates = both(TOKENS, LENGTHS)
    for joined, place in ((queries, 0), (candidates, 1)):
        wanted = [each(TOKENS, LENGTHS)[place] for each in (one, other)]
        assert all(torch.equal(part, half) for part, half in zip(both.split(joined), wanted, strict=True))
    halves = [half.detach().double().numpy()[:3] for each in (one, other) for half in each(TOKENS, LENGTHS)]
    unit = np.hstack([half / np.linalg.norm(half, axis=1, keepdims=True) for half in halves])
    np.testing.assert_allclose(both.encode(TOKENS, LENGTHS)[:3], unit, rtol=1e-5, atol=1e-7)
    assert torch.equal(both.encode(TOKENS, LENGTHS)[3], torch.zeros(18))
    raw = both.encode(TOKENS, LENGTHS, normalize=False)
    assert torch.equal(raw, torch.cat([*one(TOKENS, LENGTHS), *other(TOKENS, LENGTHS)], dim=1))
    assert not raw.requires_grad


def test_the_loss_of_one_model_gives_no_gradient_to_another():
    both = CombinedQuickThoughts(model(), model())
    queries, _ = both.split(both(TOKENS, LENGTHS)[0])
    queries.square().sum().backward()
    one, other = both.parts
    assert not any(parameter.grad is not None and parameter.grad.any() for parameter in other.parameters())
    assert all(parameter.grad.any() for parameter in one.query_encoder.recurrent.parameters())


def test_no_model_to_combine_is_refused():
    with pytest.raises(ValueError, match="models: want at least one model, got none"):
        CombinedQuickThoughts()
