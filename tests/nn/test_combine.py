"""Encoders of two channels against numpy, and frozen tables that two encoders share."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fastqt.nn import BagOfWords, Combine, Encoder, GRUEncoder, MultiChannel
from fastqt.nn.combine import share_frozen_tables
from tests.shared.tolerances import FLOAT32, relative

V, W, H = 12, 4, 6
TOKENS = torch.tensor([[1, 2, 3, 2], [4, 5, 0, 0], [6, 0, 0, 0], [0, 0, 0, 0]])
LENGTHS = torch.tensor([4, 2, 1, 0])


@pytest.fixture
def vectors() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(V, W)


def bag(table: np.ndarray, sentence: list[int]) -> np.ndarray:
    return np.sum([table[word] for word in sentence], axis=0)


def last_state(table: np.ndarray, sentence: list[int], gru: nn.Module, suffix: str = "") -> np.ndarray:
    """The last state of a GRU with reset after, by its formulas."""
    weights = {name: array.numpy().astype(np.float64) for name, array in gru.state_dict().items()}
    W_i, W_h, b_i, b_h = (
        weights[f"{name}_l0{suffix}"] for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    )
    h = np.zeros(W_h.shape[1])
    for word in sentence:
        i, s = (np.split(each, 3) for each in (W_i @ table[word] + b_i, W_h @ h + b_h))
        r, z = (1 / (1 + np.exp(-(i[gate] + s[gate]))) for gate in (0, 1))
        h = (1 - z) * np.tanh(i[2] + r * s[2]) + z * h
    return h


def oracle(channel: Encoder, sentence: list[int]) -> np.ndarray:
    table = channel.embedding.weight.detach().numpy().astype(np.float64)
    if isinstance(channel, BagOfWords):
        return bag(table, sentence)
    ways = [last_state(table, sentence, channel.recurrent)]
    if channel.recurrent.bidirectional:
        ways.append(last_state(table, sentence[::-1], channel.recurrent, "_reverse"))
    return np.concatenate(ways)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("kind", ["bow", "gru", "bigru"])
def test_channels_are_concatenated(vectors, kind, sparse):
    encoder = MultiChannel(vectors, word_dim=3, hidden_size=H, kind=kind, sparse=sparse)
    assert encoder.embedding_dim == (W + 3 if kind == "bow" else 2 * H)
    if kind != "bow":
        ways = [2 if channel.recurrent.bidirectional else 1 for channel in encoder.encoders]
        assert ways == [2, 2] if kind == "bigru" else ways == [1, 1]
    found = encoder(TOKENS, LENGTHS)
    for row, length in enumerate(LENGTHS[:3].tolist()):
        sentence = TOKENS[row, :length].tolist()
        wanted = np.concatenate([oracle(channel, sentence) for channel in encoder.encoders])
        assert relative(found[row], wanted) <= FLOAT32
    assert not found[3].any()


@pytest.mark.parametrize("kind", ["bow", "gru", "bigru"])
def test_gradients_reach_all_but_the_frozen_table(vectors, kind):
    """Gradients are those of finite differences in float64, and the frozen table has none."""
    encoder = MultiChannel(vectors, hidden_size=H, kind=kind).double()
    frozen, trained = (channel.embedding.weight for channel in encoder.encoders)
    assert torch.equal(frozen, vectors.double())
    assert not frozen.requires_grad
    weights = [weight for weight in encoder.parameters() if weight.requires_grad]
    assert frozen not in set(weights)
    direction = torch.randn(4, encoder.embedding_dim, dtype=torch.float64)
    gradients = torch.autograd.grad((encoder(TOKENS, LENGTHS) * direction).sum(), weights)
    with torch.no_grad():
        for weight, gradient in zip(weights, gradients, strict=True):
            step = 1e-6 * torch.randn_like(weight)
            ends = []
            for sign in (1, -2):
                weight += sign * step
                ends.append((encoder(TOKENS, LENGTHS) * direction).sum())
            weight += step
            slope = (ends[0] - ends[1]) / 2
            assert slope.item() == pytest.approx((gradient * step).sum().item(), rel=1e-5, abs=1e-13)
    used = trained.new_zeros(V, dtype=torch.bool)
    used[TOKENS[torch.arange(4) < LENGTHS[:, None]]] = True
    (of_table,) = torch.autograd.grad((encoder(TOKENS, LENGTHS) * direction).sum(), [trained])
    assert torch.equal(of_table.abs().sum(1) > 0, used)


def test_the_default_is_the_model_of_the_paper(vectors):
    for encoder in (MultiChannel(vectors, hidden_size=H), MultiChannel(vectors, hidden_size=H, kind="bigru")):
        assert all(channel.recurrent.bidirectional for channel in encoder.encoders)
        assert encoder.encoders[1].embedding.weight.shape == (V, W)


def test_an_unknown_kind_is_refused(vectors):
    with pytest.raises(ValueError, match="kind: want"):
        MultiChannel(vectors, kind="lstm")


def test_bags_start_from_vectors(vectors):
    for freeze in (False, True):
        encoder = BagOfWords(V, W, vectors=vectors, freeze=freeze)
        assert torch.equal(encoder.embedding.weight, vectors)
        assert encoder.embedding.weight.requires_grad == (not freeze)
    with pytest.raises(ValueError, match=r"vectors: want shape \(12, 3\), got \(12, 4\)"):
        BagOfWords(V, 3, vectors=vectors)


def test_frozen_tables_are_shared_and_stored_once(vectors, tmp_path):
    f, g = (MultiChannel(vectors + shift, hidden_size=H) for shift in (0.0, 1.0))
    own = g.encoders[1].embedding
    share_frozen_tables(f, g)
    assert g.encoders[0].embedding is f.encoders[0].embedding
    assert g.encoders[1].embedding is own
    assert f.encoders[1].embedding is not own
    both = nn.ModuleList([f, g])
    tables = [name for name in both.state_dict() if name.endswith("embedding.weight")]
    assert tables == [
        f"{place}.embedding.weight" for place in ("0.encoders.0", "0.encoders.1", "1.encoders.1")
    ]
    save_file(both.state_dict(), tmp_path / "x.safetensors")  # which refuses tensors that share memory
    queries, candidates = (encoder(TOKENS, LENGTHS) for encoder in both)
    moved = nn.ModuleList([f, g]).double()
    assert moved[1].encoders[0].embedding.weight.dtype == torch.float64
    assert relative(g(TOKENS, LENGTHS), candidates.double()) <= FLOAT32
    assert not torch.equal(queries, candidates)


def test_tables_that_are_trained_are_not_shared():
    f, g = (Combine(GRUEncoder(V, W, H), BagOfWords(V, W)) for _ in range(2))
    names = list(g.state_dict())
    share_frozen_tables(f, g)
    assert list(g.state_dict()) == names
