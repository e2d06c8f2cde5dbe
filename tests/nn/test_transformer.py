"""The Transformer against a float64 implementation in numpy that takes one sentence at a time."""

import numpy as np
import pytest
import torch
from torch import Tensor

from fastqt.nn import QuickThoughts, Transformer
from fastqt.sentences.train.optim import Adam
from tests.shared.tolerances import FLOAT32, FLOAT64, REORDERED_FLOAT32, REORDERED_FLOAT64, relative

V, L = 40, 7
LENGTHS = torch.tensor([3, 7, 1, 0, 7, 2])
both_poolings = pytest.mark.parametrize("pooling", ["mean", "first"])


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def tiny(pooling: str = "mean", **options) -> Transformer:
    sizes = {"layers": 2, "heads": 3, "feedforward": 10, "max_length": L, "dropout": 0.0}
    encoder = Transformer(V, 6, pooling=pooling, **(sizes | options))
    with torch.no_grad():  # moves biases and norms away from 0 and 1, so that errors in them show
        for parameter in encoder.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return encoder


def batch() -> tuple[Tensor, Tensor]:
    return torch.randint(V, (len(LENGTHS), L)), LENGTHS


def gradients(encoder: Transformer, tokens: Tensor, lengths: Tensor, upstream: Tensor) -> list[Tensor]:
    return torch.autograd.grad((encoder(tokens, lengths) * upstream).sum(), list(encoder.parameters()))


def vector_by_definition(encoder: Transformer, sentence: list[int], heads: int) -> np.ndarray:
    """The vector of one sentence; row i of the matrix x belongs to word i."""
    weights = {name: value.double().numpy() for name, value in encoder.state_dict().items()}

    def norm(x, name):
        x = x - x.mean(axis=-1, keepdims=True)
        x = x / np.sqrt(x.var(axis=-1, keepdims=True) + 1e-5)
        return x * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def linear(x, name):
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    x = weights["embedding.weight"][sentence] + weights["positions.weight"][: len(sentence)]
    if "summary" in weights:
        x = np.vstack([weights["summary"], x])
    dim = x.shape[1]
    x = x * dim**0.5
    width = dim // heads
    for layer in range(2):
        name = f"layers.{layer}"
        q, k, v = np.split(linear(norm(x, f"{name}.attention_norm"), f"{name}.query_key_value"), 3, axis=1)
        columns = []
        for head in range(heads):
            own = slice(head * width, (head + 1) * width)
            weight = np.exp(q[:, own] @ k[:, own].T / width**0.5)
            columns.append(weight / weight.sum(1, keepdims=True) @ v[:, own])
        x = x + linear(np.hstack(columns), f"{name}.output")
        hidden = np.maximum(linear(norm(x, f"{name}.feedforward_norm"), f"{name}.expand"), 0)
        x = x + linear(hidden, f"{name}.contract")
    x = norm(x, "norm")
    return x[0] if "summary" in weights else x.mean(0)


@both_poolings
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, FLOAT32), (torch.float64, FLOAT64)])
def test_vectors_equal_a_numpy_implementation(pooling, dtype, tolerance):
    encoder = tiny(pooling).to(dtype)
    tokens, lengths = batch()
    got = encoder(tokens, lengths)
    assert got.shape == (len(tokens), encoder.embedding_dim)
    for row, sentence, length in zip(got, tokens.tolist(), lengths.tolist(), strict=True):
        want = vector_by_definition(encoder, sentence[:length], heads=3) if length else np.zeros(6)
        assert relative(row, want) <= tolerance


@both_poolings
def test_gradients_equal_finite_differences(pooling):
    encoder = tiny(pooling, layers=1, max_length=3).double()
    tokens, lengths = torch.tensor([[1, 2, 3], [4, 1, 0], [9, 9, 9]]), torch.tensor([3, 2, 0])
    names = list(dict(encoder.named_parameters()))

    def vectors(*parameters):
        values = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(encoder, values, (tokens, lengths))

    assert torch.autograd.gradcheck(vectors, tuple(encoder.parameters()))


@both_poolings
def test_padding_changes_neither_vectors_nor_gradients(pooling):
    encoder = tiny(pooling)
    tokens, lengths = batch()
    upstream = torch.randn(len(tokens), encoder.embedding_dim)
    vectors, wanted = encoder(tokens, lengths), gradients(encoder, tokens, lengths, upstream)
    junk = torch.where(torch.arange(L) < lengths.unsqueeze(1), tokens, -1)
    wide = torch.cat([junk, torch.full((len(tokens), 5), V + 99)], dim=1)
    for padded in (junk, wide):
        assert torch.equal(encoder(padded, lengths), vectors)
        assert all(map(torch.equal, gradients(encoder, padded, lengths, upstream), wanted))


@both_poolings
def test_other_sentences_of_the_batch_do_not_change_a_vector(pooling):
    """Neither longer sentences nor the order of the batch change vectors, nor summed gradients."""
    encoder = tiny(pooling).double()
    tokens, lengths = batch()
    upstream = torch.randn(len(tokens), encoder.embedding_dim, dtype=torch.float64)
    vectors, wanted = encoder(tokens, lengths), gradients(encoder, tokens, lengths, upstream)
    order = torch.randperm(len(tokens))
    assert relative(encoder(tokens[order], lengths[order]), vectors[order]) <= REORDERED_FLOAT64
    shuffled = gradients(encoder, tokens[order], lengths[order], upstream[order])
    apart = [
        gradients(encoder, tokens[i : i + 1], lengths[i : i + 1], upstream[i : i + 1])
        for i in range(len(tokens))
        if lengths[i]
    ]
    for want, other, *parts in zip(wanted, shuffled, *apart, strict=True):
        assert relative(other, want) <= FLOAT64
        assert relative(sum(parts), want) <= FLOAT64


@both_poolings
@pytest.mark.parametrize("rows", [0, 3])
def test_batch_without_words_gives_zeros(pooling, rows):
    encoder = tiny(pooling)
    for width in (0, 4):
        got = encoder(torch.zeros(rows, width, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64))
        assert torch.equal(got, torch.zeros(rows, encoder.embedding_dim))


@both_poolings
def test_word_order_changes_the_vector(pooling):
    encoder = tiny(pooling)
    vectors = encoder(torch.tensor([[1, 2, 3], [3, 2, 1]]), torch.tensor([3, 3]))
    assert relative(vectors[0], vectors[1]) > 0.01


@both_poolings
def test_all_parameters_but_only_words_of_the_batch_get_gradients(pooling):
    encoder = tiny(pooling)
    tokens, lengths = batch()
    encoder(tokens, lengths).pow(3).sum().backward()
    for name, parameter in encoder.named_parameters():
        assert parameter.grad.abs().sum() > 0, name
    read = torch.zeros(V, dtype=torch.bool)
    read[tokens[torch.arange(L) < lengths.unsqueeze(1)]] = True
    assert torch.equal(encoder.embedding.weight.grad.abs().sum(1) > 0, read)


def test_sparse_gradient_and_its_adam_step_equal_the_dense_ones():
    dense, sparse = tiny(), tiny(sparse=True)
    sparse.load_state_dict(dense.state_dict())
    tokens, lengths = batch()
    for encoder in (dense, sparse):
        encoder(tokens, lengths).pow(3).sum().backward()
    assert sparse.embedding.weight.grad.is_sparse
    assert relative(sparse.embedding.weight.grad.to_dense(), dense.embedding.weight.grad) <= REORDERED_FLOAT32
    for encoder in (dense, sparse):
        Adam(encoder.parameters(), lr=1e-3).step()
    assert relative(sparse.embedding.weight, dense.embedding.weight) <= REORDERED_FLOAT32


def test_dropout_is_active_only_in_training_mode():
    encoder = tiny(dropout=0.5)
    tokens, lengths = batch()
    assert not torch.equal(encoder(tokens, lengths), encoder(tokens, lengths))
    encoder.eval()
    assert torch.equal(encoder(tokens, lengths), encoder(tokens, lengths))
    undropped = tiny(dropout=0.0)
    undropped.load_state_dict(encoder.state_dict())
    assert torch.equal(encoder(tokens, lengths), undropped(tokens, lengths))


def test_default_sizes_are_those_of_the_reimplementation():
    with torch.device("meta"):
        encoder = Transformer(1000)
    d, ff = 300, 1000
    attention, feedforward, norms = 4 * d * (d + 1), 2 * d * ff + ff + d, 2 * 2 * d
    tables = (1000 + 50) * d
    assert len(encoder.layers) == 6
    assert encoder.layers[0].heads == 5
    count = sum(parameter.numel() for parameter in encoder.parameters())
    assert count == tables + 6 * (attention + feedforward + norms) + 2 * d


def test_autocast_computes_in_its_dtype():
    encoder = tiny()
    tokens, lengths = batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        vectors = encoder(tokens, lengths)
    # The bound allows for a dozen roundings to the eight bits of bfloat16.
    assert 0 < relative(vectors, encoder(tokens, lengths)) < 0.05
    vectors.float().sum().backward()


def test_transformer_can_encode_for_quickthoughts():
    model = QuickThoughts(tiny(), tiny())
    queries, candidates = model(*batch())
    assert queries.shape == candidates.shape == (len(LENGTHS), 6)
    assert model.encode(*batch()).shape == (len(LENGTHS), 12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 4}, "heads: want a divisor of dim=6, got 4"),
        ({"heads": 0}, "heads: want a divisor"),
        ({"layers": 0}, "layers: want at least 1, got 0"),
        ({"max_length": 0}, "max_length: want at least 1, got 0"),
        ({"feedforward": 0}, "feedforward: want at least 1, got 0"),
        ({"dropout": 1.0}, r"dropout: want a probability in \[0, 1\), got 1.0"),
        ({"pooling": "last"}, "pooling: want one of 'mean', 'first', got 'last'"),
    ],
)
def test_invalid_option_raises(options, message):
    with pytest.raises(ValueError, match=message):
        tiny(**options)


def test_too_long_sentence_raises():
    tokens = torch.zeros(2, 9, dtype=torch.int64)
    assert tiny()(tokens, torch.tensor([7, 2])).shape == (2, 6)
    with pytest.raises(ValueError, match="lengths: want at most max_length=7 words a sentence, got 8"):
        tiny()(tokens, torch.tensor([3, 8]))


def test_invalid_batch_raises():
    with pytest.raises(ValueError, match=r"tokens: want \(B, L\) int64"):
        tiny()(torch.zeros(3), torch.zeros(3, dtype=torch.int64))
