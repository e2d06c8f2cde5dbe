"""Sentence encoders against torch's own layers on one sentence at a time, without padding."""

import pytest
import torch
from torch import Tensor, nn

from fastqt.nn import BagOfWords, Combine, Encoder, GRUEncoder, LSTMEncoder, MultiChannel
from tests.shared.tolerances import ENCODED_FLOAT32

V, W, H = 40, 6, 8
LENGTHS = torch.tensor([3, 7, 1, 0, 7, 2])


ENCODERS = {
    "bow": lambda: BagOfWords(V, H),
    "gru": lambda: GRUEncoder(V, W, H),
    "bigru": lambda: GRUEncoder(V, W, H, bidirectional=True),
    "reset-before": lambda: GRUEncoder(V, W, H, bidirectional=True, reset_after=False),
    "lstm": lambda: LSTMEncoder(V, W, H),
    "bilstm": lambda: LSTMEncoder(V, W, H, bidirectional=True),
    "combine": lambda: Combine(GRUEncoder(V, W, H), GRUEncoder(V, W, H, bidirectional=True)),
    "multichannel": lambda: MultiChannel(torch.randn(V, W), hidden_size=H),
    "multichannel-bow": lambda: MultiChannel(torch.randn(V, W), kind="bow"),
}
each_encoder = pytest.mark.parametrize("name", ENCODERS)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def batch() -> tuple[Tensor, Tensor]:
    return torch.randint(V, (len(LENGTHS), 7)), LENGTHS


def encode_alone(encoder: Encoder, sentence: Tensor) -> Tensor:
    """The vector of one sentence (L,), from the definitions and torch's layers."""
    if isinstance(encoder, Combine):
        return torch.cat([encode_alone(part, sentence) for part in encoder.encoders])
    words = encoder.embedding(sentence)
    if isinstance(encoder, BagOfWords):
        return words.sum(0)
    if isinstance(encoder, LSTMEncoder):
        layer = encoder.recurrent
    else:
        layer = nn.GRU(W, encoder.recurrent.hidden_size, bidirectional=encoder.recurrent.bidirectional)
        layer.load_state_dict(encoder.recurrent.state_dict())
    states, _ = layer(words.unsqueeze(1))
    if not layer.bidirectional:
        return states[-1, 0]
    half = layer.hidden_size
    return torch.cat([states[-1, 0, :half], states[0, 0, half:]])


@pytest.mark.parametrize("name", [name for name in ENCODERS if name != "reset-before"])
def test_vectors_equal_those_of_single_sentences(name):
    encoder = ENCODERS[name]()
    tokens, lengths = batch()
    got = encoder(tokens, lengths)
    assert got.shape == (len(tokens), encoder.embedding_dim)
    for i, length in enumerate(lengths):
        if length:
            torch.testing.assert_close(got[i], encode_alone(encoder, tokens[i, :length]), **ENCODED_FLOAT32)


@each_encoder
def test_padding_and_other_sentences_do_not_change_a_vector(name):
    encoder = ENCODERS[name]()
    tokens, lengths = batch()
    want = encoder(tokens, lengths)
    assert (want[lengths == 0] == 0).all()
    junk = torch.where(torch.arange(7) < lengths.unsqueeze(1), tokens, -1)
    assert torch.equal(encoder(junk, lengths), want)
    wide = torch.cat([tokens, torch.full((len(tokens), 5), V + 99)], dim=1)
    assert torch.equal(encoder(wide, lengths), want)
    for i, length in enumerate(lengths):
        alone = encoder(tokens[i : i + 1, : max(int(length), 1)], lengths[i : i + 1])
        assert alone.shape == (1, encoder.embedding_dim)
        torch.testing.assert_close(alone[0], want[i], **ENCODED_FLOAT32)


@each_encoder
@pytest.mark.parametrize("rows", [0, 3])
def test_batch_without_words_gives_zeros(name, rows):
    encoder = ENCODERS[name]()
    for L in (0, 4):
        got = encoder(torch.zeros(rows, L, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64))
        assert torch.equal(got, torch.zeros(rows, encoder.embedding_dim))


@each_encoder
def test_only_words_of_the_batch_get_gradients(name):
    encoder = ENCODERS[name]()
    tokens, lengths = batch()
    encoder(tokens, lengths).square().sum().backward()
    read = torch.zeros(V, dtype=torch.bool)
    read[tokens[torch.arange(7) < lengths.unsqueeze(1)]] = True
    for parameter_name, parameter in encoder.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad.abs().sum() > 0, parameter_name
        if parameter.requires_grad and parameter_name.endswith("embedding.weight"):
            assert torch.equal(parameter.grad.abs().sum(1) > 0, read), parameter_name


def test_backward_state_depends_on_the_whole_sentence():
    # A published implementation took the backward state at the last token, where it has read only that word.
    encoder = GRUEncoder(V, W, H, bidirectional=True)
    tokens, lengths = torch.tensor([[1, 2, 3]]), torch.tensor([3])
    first_word_changed = torch.tensor([[9, 2, 3]])
    a, b = encoder(tokens, lengths)[0, H // 2 :], encoder(first_word_changed, lengths)[0, H // 2 :]
    assert (a - b).abs().max() > 1e-4
    output, _ = encoder.recurrent(encoder.embedding(tokens[0]).unsqueeze(1))
    torch.testing.assert_close(a, output[0, 0, H // 2 :], **ENCODED_FLOAT32)
    assert (a - output[-1, 0, H // 2 :]).abs().max() > 1e-4


@pytest.mark.parametrize("kind", [BagOfWords, GRUEncoder, LSTMEncoder])
def test_sparse_gradients_equal_dense_ones(kind):
    dense = kind(V)
    sparse = kind(V, sparse=True)
    sparse.load_state_dict(dense.state_dict())
    tokens, lengths = batch()
    for encoder in (dense, sparse):
        encoder(tokens, lengths).square().sum().backward()
    assert sparse.embedding.weight.grad.is_sparse
    torch.testing.assert_close(
        sparse.embedding.weight.grad.to_dense(), dense.embedding.weight.grad, **ENCODED_FLOAT32
    )


def test_initial_vectors_are_copied_and_frozen_on_request():
    vectors = torch.randn(V, W)
    for freeze in (True, False):
        encoder = GRUEncoder(V, W, H, vectors=vectors, freeze=freeze)
        assert torch.equal(encoder.embedding.weight, vectors)
        assert encoder.embedding.weight.data_ptr() != vectors.data_ptr()
        assert encoder.embedding.weight.requires_grad == (not freeze)


def test_multichannel_has_a_frozen_and_a_trained_channel():
    vectors = torch.randn(V, W)
    encoder = MultiChannel(vectors, word_dim=3, hidden_size=H)
    frozen, trained = encoder.encoders
    assert torch.equal(frozen.embedding.weight, vectors)
    assert not frozen.embedding.weight.requires_grad
    assert trained.embedding.weight.shape == (V, 3)
    assert trained.embedding.weight.requires_grad
    assert encoder.embedding_dim == 2 * H


@pytest.mark.parametrize("bidirectional", [True, False])
def test_initial_values_of_the_gru(bidirectional):
    W, width = 30, 50
    H = width // 2 if bidirectional else width
    encoder = GRUEncoder(1000, W, width, bidirectional=bidirectional)
    assert 0.0999 < encoder.embedding.weight.abs().max() <= 0.1
    for name, parameter in encoder.recurrent.named_parameters():
        gates, candidate = parameter[: 2 * H], parameter[2 * H :]
        if name.startswith("bias"):
            assert (gates == 1).all()
            assert (candidate == 0).all()
        else:
            for part, fan_out in ((gates, 2 * H), (candidate, H)):
                bound = (6 / (W + H + fan_out)) ** 0.5
                assert 0.99 * bound < part.abs().max() <= bound
                assert part.mean().abs() < 0.1 * bound
    assert not any(buffer.any() for buffer in encoder.recurrent.buffers())


def test_initial_values_of_the_lstm():
    lstm = LSTMEncoder(V, W, H).recurrent
    bias = lstm.bias_ih_l0 + lstm.bias_hh_l0
    assert bias.tolist() == [0.0] * H + [1.0] * H + [0.0] * 2 * H
    assert lstm.weight_ih_l0.abs().max() <= (6 / (W + 5 * H)) ** 0.5


@pytest.mark.parametrize("kind", [BagOfWords, GRUEncoder, LSTMEncoder])
def test_initial_values_of_torch(kind):
    encoder = kind(1000, init="torch")
    assert encoder.embedding.weight.std().item() == pytest.approx(1, abs=0.01)
    for parameter in getattr(encoder, "recurrent", nn.Identity()).parameters():
        assert 0.99 * 1000**-0.5 < parameter.abs().max() <= 1000**-0.5


@pytest.mark.parametrize(
    ("tokens", "lengths", "message"),
    [
        (torch.zeros(3, dtype=torch.int64), LENGTHS, r"tokens: want \(B, L\) int64, got \(3,\)"),
        (torch.zeros(6, 7), LENGTHS, r"tokens: .*got \(6, 7\) torch.float32"),
        (torch.zeros(6, 7, dtype=torch.int64), LENGTHS[:5], r"lengths: want \(6,\) int64, got \(5,\)"),
        (torch.zeros(6, 7, dtype=torch.int64), LENGTHS.int(), r"lengths: .*torch.int32"),
        (torch.zeros(6, 7, dtype=torch.int64), LENGTHS + 1, r"values in 0..7.*got 1..8"),
        (torch.zeros(6, 7, dtype=torch.int64), LENGTHS - 1, r"values in 0..7.*got -1..6"),
    ],
)
@pytest.mark.parametrize("name", ["bow", "gru", "lstm"])
def test_invalid_batch_raises(name, tokens, lengths, message):
    with pytest.raises(ValueError, match=message):
        ENCODERS[name]()(tokens, lengths)


@each_encoder
def test_token_id_outside_the_vocabulary_raises(name):
    with pytest.raises((IndexError, RuntimeError), match=r"(?i)index|out of range"):
        ENCODERS[name]()(torch.full((1, 2), V), torch.tensor([2]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GRUEncoder(V, W, 7, bidirectional=True), "hidden_size: want an even number.*got 7"),
        (
            lambda: GRUEncoder(V, W, H, vectors=torch.randn(V, W + 1)),
            r"vectors: want shape \(40, 6\), got \(40, 7\)",
        ),
        (lambda: MultiChannel(torch.randn(V)), r"vectors: want shape \(V, W\), got \(40,\)"),
        (lambda: BagOfWords(V, H, init="zeros"), "init: want one of 'paper', 'torch', got 'zeros'"),
        (lambda: Combine(), "encoders: want at least one"),
    ],
)
def test_invalid_option_raises(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_without_words_gradients_of_zero_flow_to_all_parameters(name, shape):
    """Of no sentences and of empty ones: a process that has none takes part in DDP's sums."""
    encoder = ENCODERS[name]()
    vectors = encoder(torch.zeros(shape, dtype=torch.int64), torch.zeros(shape[0], dtype=torch.int64))
    assert tuple(vectors.shape) == (shape[0], encoder.embedding_dim)
    vectors.sum().backward()
    assert all(p.grad is not None for p in encoder.parameters() if p.requires_grad)
