"""Sentence encoders against torch's own layers on one sentence at a time, without padding."""

from functools import partial

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fastqt.nn import (
    BagOfWords,
    Combine,
    Encoder,
    GRUEncoder,
    LSTMEncoder,
    MultiChannel,
    QuickThoughts,
    SkipThoughts,
    Transformer,
)
from fastqt.nn.combine import share_frozen_tables
from tests.shared.tolerances import ENCODED_FLOAT32, FLOAT32, relative

V, W, H = 40, 6, 8
LENGTHS = torch.tensor([3, 7, 1, 0, 7, 2])


TINY = {"layers": 2, "heads": 3, "feedforward": 10, "max_length": 7, "dropout": 0.0}
ENCODERS = {
    "bow": lambda: BagOfWords(V, H),
    "static": lambda: BagOfWords(V, H, mode="mean"),
    "gru": lambda: GRUEncoder(V, W, H),
    "bigru": lambda: GRUEncoder(V, W, H, bidirectional=True),
    "reset-before": lambda: GRUEncoder(V, W, H, bidirectional=True, reset_after=False),
    "lstm": lambda: LSTMEncoder(V, W, H),
    "bilstm": lambda: LSTMEncoder(V, W, H, bidirectional=True),
    "combine": lambda: Combine(GRUEncoder(V, W, H), GRUEncoder(V, W, H, bidirectional=True)),
    "multichannel": lambda: MultiChannel(torch.randn(V, W), hidden_size=H),
    "multichannel-gru": lambda: MultiChannel(torch.randn(V, W), hidden_size=H, kind="gru"),
    "multichannel-bow": lambda: MultiChannel(torch.randn(V, W), kind="bow"),
    **{f"transformer, {x}": partial(Transformer, V, 6, pooling=x, **TINY) for x in ("mean", "first")},
}
OF_ONE_SENTENCE = [name for name in ENCODERS if not name.startswith(("reset-before", "transformer"))]
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
        return words.sum(0) / (max(len(sentence), 1) if encoder.mode == "mean" else 1)
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


@pytest.mark.parametrize("name", OF_ONE_SENTENCE)
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
def test_only_words_of_the_batch_get_gradients(name):
    encoder = ENCODERS[name]()
    tokens, lengths = batch()
    encoder(tokens, lengths).pow(3).sum().backward()
    read = torch.zeros(V, dtype=torch.bool)
    read[tokens[torch.arange(7) < lengths.unsqueeze(1)]] = True
    if name.startswith("multichannel"):
        frozen, trained = (each.embedding.weight.requires_grad for each in encoder.encoders)
        assert (frozen, trained) == (False, True)
    for parameter_name, parameter in encoder.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad.abs().sum() > 0, parameter_name
        if parameter.requires_grad and parameter_name.endswith("embedding.weight"):
            assert torch.equal(parameter.grad.abs().sum(1) > 0, read), parameter_name


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
        (lambda: GRUEncoder(V, W, H, vectors=torch.randn(V, W + 1)), r"vectors: want shape \(40, 6\), got"),
        (lambda: MultiChannel(torch.randn(V)), r"vectors: want shape \(V, W\), got \(40,\)"),
        (lambda: BagOfWords(V, H, init="zeros"), "init: want one of 'paper', 'torch', got 'zeros'"),
        (lambda: BagOfWords(V, H, mode="max"), "mode: want one of 'sum', 'mean', got 'max'"),
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
    assert torch.equal(vectors, torch.zeros(shape[0], encoder.embedding_dim))
    vectors.sum().backward()
    assert all(p.grad is not None for p in encoder.parameters() if p.requires_grad)


# Of the papers.
SIZES = VOCABULARY, WORD, HIDDEN = 20_000, 300, 1000


def count(model: nn.Module) -> int:
    """On the meta device."""
    assert all(parameter.is_meta for parameter in model.parameters())
    return sum(parameter.numel() for parameter in model.parameters())


def test_models_have_as_many_parameters_as_in_the_paper():
    """Those that Logeswaran and Lee (arXiv:1803.02893) report, and those of a Transformer's defaults."""
    with torch.device("meta"):
        quickthoughts = QuickThoughts(GRUEncoder(*SIZES), GRUEncoder(*SIZES))
        skip_thoughts, transformer = SkipThoughts(*SIZES), Transformer(1000)
    gates = 3 * HIDDEN * (HIDDEN + WORD + 1)
    assert count(quickthoughts) == 2 * gates + 2 * VOCABULARY * WORD == 19_806_000
    assert count(skip_thoughts) == 3 * gates + VOCABULARY * WORD + 2 * HIDDEN * VOCABULARY == 57_709_000
    d, ff, layers = 300, 1000, 6
    attention, feedforward, norms = 4 * d * (d + 1), 2 * d * ff + ff + d, 2 * 2 * d
    assert count(transformer) == (1000 + 50) * d + layers * (attention + feedforward + norms) + 2 * d
    assert (len(transformer.layers), transformer.layers[0].heads) == (layers, 5)


def test_bags_start_from_vectors():
    vectors = torch.randn(V, W)
    for freeze in (False, True):
        encoder = BagOfWords(V, W, vectors=vectors, freeze=freeze)
        assert torch.equal(encoder.embedding.weight, vectors)
        assert encoder.embedding.weight.requires_grad == (not freeze)
    with pytest.raises(ValueError, match=r"vectors: want shape \(40, 3\), got \(40, 6\)"):
        BagOfWords(V, 3, vectors=vectors)


def test_frozen_tables_are_shared_and_stored_once(tmp_path):
    vectors = torch.randn(V, W)
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
    data = batch()
    queries, candidates = (encoder(*data) for encoder in both)
    moved = nn.ModuleList([f, g]).double()
    assert moved[1].encoders[0].embedding.weight.dtype == torch.float64
    assert relative(g(*data), candidates.double()) <= FLOAT32
    assert not torch.equal(queries, candidates)


def test_tables_that_are_trained_are_not_shared():
    f, g = (Combine(GRUEncoder(V, W, H), BagOfWords(V, W)) for _ in range(2))
    names = list(g.state_dict())
    share_frozen_tables(f, g)
    assert list(g.state_dict()) == names
