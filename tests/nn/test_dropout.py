"""Dropout on a CPU keeps each element by itself with the given probability, and keeps the expected value."""

import math

import pytest
import torch

from fastqt.nn import Transformer
from fastqt.nn.dropout import Dropout, dropout_noise

SHAPE = (400, 501)  # no multiple of the four elements of a draw


def kept_by(dropout, x):
    return dropout(x) != 0


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_elements_are_kept_independently_with_their_probability(p):
    torch.manual_seed(0)
    x = torch.ones(SHAPE, dtype=torch.float64)
    kept = kept_by(Dropout(p), x).double().flatten()
    deviation = math.sqrt(p * (1 - p) / x.numel())
    assert abs(kept.mean() - (1 - p)) < 5 * deviation

    # Elements of one draw, of neighbouring draws and of neighbouring rows say nothing of each other.
    centred = kept - (1 - p)
    for lag in (1, 2, 3, 4, 501):
        covariance = (centred[lag:] * centred[:-lag]).mean()
        assert abs(covariance) < 5 * deviation * math.sqrt(p * (1 - p))


def test_values_and_gradients_are_scaled_so_that_the_mean_is_that_of_the_input():
    torch.manual_seed(1)
    x = torch.randn(SHAPE, dtype=torch.float64).requires_grad_()
    y = Dropout(0.3)(x)
    y.sum().backward()
    scale = 65536 / (65536 - round(0.3 * 65536))
    kept = y != 0
    assert torch.equal(y[kept], x[kept] * scale)
    assert torch.equal(x.grad, kept.double() * scale)
    assert scale == pytest.approx(1 / 0.7, rel=1e-5)


def test_masks_follow_the_generator():
    x, dropout = torch.ones(7, 5, 3).transpose(0, 2), Dropout(0.5)
    torch.manual_seed(2)
    first, second = kept_by(dropout, x), kept_by(dropout, x)
    torch.manual_seed(2)
    assert torch.equal(kept_by(dropout, x), first)
    assert not torch.equal(first, second)
    assert dropout(x.bfloat16()).dtype is torch.bfloat16


@pytest.mark.parametrize("p", [0.0, 1e-7, 1.0])
def test_extremes_are_those_of_torch(p):
    x = torch.randn(20, 20)
    assert torch.equal(Dropout(p)(x), torch.nn.Dropout(p)(x))


def test_evaluation_and_empty_inputs_change_nothing():
    x = torch.randn(3, 4)
    assert torch.equal(Dropout(0.5).eval()(x), x)
    assert Dropout(0.5)(x[:0]).shape == (0, 4)


@pytest.mark.slow  # for what torch does before it compiles for the first time
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_modules_draw_the_same_numbers(dtype):
    """Also where one tensor goes through two dropouts, whose calls look alike to a compiler."""
    dropout = Dropout(0.5)

    def function(x):
        return dropout(x) + 10 * dropout(x) + 100 * dropout(x.exp())

    compiled = torch.compile(function, dynamic=True, backend="aot_eager", fullgraph=True)
    results = []
    for each in (function, compiled):
        torch.manual_seed(3)
        for rows in (6, 5):
            x = torch.ones(rows, 9, dtype=dtype).requires_grad_()
            y = each(x)
            results += [y, *torch.autograd.grad(y.sum(), x), torch.rand(1)]
    assert all(map(torch.equal, results[:6], results[6:]))


def test_the_operator_is_what_compilers_are_told():
    arguments = (torch.empty(0), [5, 3], torch.bfloat16, 30_000)
    torch.library.opcheck(dropout_noise, arguments, test_utils=("test_schema", "test_faketensor"))


def test_transforms_of_functions_draw_as_they_are_told():
    x, dropout = torch.ones(4, 50), Dropout(0.5)
    same, different = (
        torch.func.vmap(dropout, randomness=randomness)(x) for randomness in ("same", "different")
    )
    assert (same == same[0]).all()
    assert not (different == different[0]).all()


def test_a_transformer_takes_its_numbers_from_the_generator():
    encoder = Transformer(20, 8, layers=1, heads=2, feedforward=16, dropout=0.3)
    tokens, lengths = torch.randint(20, (3, 4)), torch.tensor([4, 2, 3])
    torch.manual_seed(4)
    first, second = encoder(tokens, lengths), encoder(tokens, lengths)
    with torch.random.fork_rng():
        torch.manual_seed(4)
        assert torch.equal(encoder(tokens, lengths), first)
    assert not torch.equal(first, second)
    assert torch.equal(encoder.eval()(tokens, lengths), encoder(tokens, lengths))
