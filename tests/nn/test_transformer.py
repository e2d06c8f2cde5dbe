"""The Transformer against a float64 implementation in numpy that takes one sentence at a time."""

import numpy as np
import pytest
import torch
from torch import Tensor

from fastqt.nn import Transformer
from tests.shared.tolerances import FLOAT32, FLOAT64, relative

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


def test_dropout_is_active_only_in_training_mode():
    encoder = tiny(dropout=0.5)
    tokens, lengths = batch()
    assert not torch.equal(encoder(tokens, lengths), encoder(tokens, lengths))
    encoder.eval()
    assert torch.equal(encoder(tokens, lengths), encoder(tokens, lengths))
    undropped = tiny(dropout=0.0)
    undropped.load_state_dict(encoder.state_dict())
    assert torch.equal(encoder(tokens, lengths), undropped(tokens, lengths))


def test_autocast_computes_in_its_dtype():
    encoder = tiny()
    tokens, lengths = batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        vectors = encoder(tokens, lengths)
    # The bound allows for a dozen roundings to the eight bits of bfloat16.
    assert 0 < relative(vectors, encoder(tokens, lengths)) < 0.05
    vectors.float().sum().backward()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 4}, "heads: want a divisor of dim=6, got 4"),
        ({"layers": 0}, "layers: want at least 1, got 0"),
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
