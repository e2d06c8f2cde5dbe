"""Negative sampling equals its definition, word2vec's update, and refuses what it cannot take."""

import numpy as np
import pytest
import torch

import fastqt
from tests.shared.tolerances import FLOAT32, FLOAT64, relative

N, M, D, K = 7, 11, 5, 4


def drawn(dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    f, g = (torch.randn(n, D, generator=generator, dtype=torch.float64) for n in (N, M))
    positives = torch.randint(M, (N,), generator=generator)
    negatives = torch.randint(M, (N, K), generator=generator)
    return f.to(dtype).requires_grad_(), g.to(dtype).requires_grad_(), positives, negatives


def oracle(f, g, positives, negatives, scale):
    """The losses of the rows and the gradients of their sum, cell by cell in numpy float64."""
    f, g = (x.detach().double().numpy() for x in (f, g))
    losses, df, dg, ds = np.zeros(len(f)), np.zeros_like(f), np.zeros_like(g), 0.0
    for i, row in enumerate(negatives.tolist()):
        cells = [(int(positives[i]), 1)] + [(j, -1) for j in row if j != positives[i]]
        for j, sign in cells:
            product = f[i] @ g[j]
            losses[i] += np.logaddexp(0, -sign * scale * product)
            slope = -sign * np.exp(-np.logaddexp(0, sign * scale * product))
            df[i] += slope * scale * g[j]
            dg[j] += slope * scale * f[i]
            ds += slope * product
    return losses, df, dg, ds


@pytest.mark.parametrize("converged", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, FLOAT64), (torch.float32, FLOAT32)])
def test_value_and_gradients(dtype, tolerance, converged):
    f, g, positives, negatives = drawn(dtype)
    if converged:  # Scores of about 45 and -45: losses of 1e-19.
        positives, negatives = torch.arange(N), torch.full((N, K), M - 1)
        with torch.no_grad():
            direction = torch.ones(D, dtype=dtype) / D**0.5
            f.mul_(0.1).add_(6 * direction)
            g.mul_(0.1).add_(5 * direction)
            g[M - 1] *= -1
    scale = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    losses, *gradients = oracle(f, g, positives, negatives, 1.5)
    given = f, g, positives, negatives
    assert relative(fastqt.negative_sampling_loss(*given, scale=1.5, reduction="none"), losses) < tolerance
    for reduction, weight in (("sum", 1.0), ("mean", 1 / N), ("none", 1.0)):
        loss = fastqt.negative_sampling_loss(*given, scale=scale, reduction=reduction).sum()
        assert relative(loss, losses.sum() * weight) < tolerance
        for found, wanted in zip(torch.autograd.grad(loss, (f, g, scale)), gradients, strict=True):
            assert relative(found, np.asarray(wanted) * weight) < tolerance


def test_rows_are_taken_in_chunks(monkeypatch):
    whole = fastqt.negative_sampling_loss(*drawn(), reduction="none")
    monkeypatch.setattr("fastqt.losses.negative_sampling.CHUNK_BYTES", 3 * (1 + K) * D * 8)
    f, g, *ids = drawn()
    assert relative(fastqt.negative_sampling_loss(f, g, *ids, reduction="none"), whole) < FLOAT64
    found = torch.autograd.grad(fastqt.negative_sampling_loss(f, g, *ids), (f, g))
    for a, b in zip(found, oracle(f, g, *ids, 1.0)[1:3], strict=True):
        assert relative(a, b / N) < FLOAT64


def test_a_step_of_the_skip_gram_is_that_of_word2vec():
    """word2vec's inner loop, for one pair after the other, with the vectors of before the step."""
    rate, words, contexts = 0.025, torch.randn(M, D).double(), torch.randn(M, D).double()
    pairs = [(2, 3), (2, 1), (5, 2)]  # a word and a word of its context
    noise = [[7, 8, 3, 9], [0, 4, 6, 10], [1, 3, 8, 9]]  # the first has its own positive: it is skipped
    syn0, syn1 = words.numpy().copy(), contexts.numpy().copy()
    new0, new1 = syn0.copy(), syn1.copy()
    for (word, context), row in zip(pairs, noise, strict=True):
        for d, target in enumerate([context, *row]):
            if d and target == context:
                continue
            g = ((d == 0) - 1 / (1 + np.exp(-(syn0[word] @ syn1[target])))) * rate
            new0[word] += g * syn1[target]
            new1[target] += g * syn0[word]
    words.requires_grad_()
    contexts.requires_grad_()
    center, positives = (torch.tensor(x) for x in zip(*pairs, strict=True))
    loss = fastqt.negative_sampling_loss(
        words[center], contexts, positives, torch.tensor(noise), reduction="sum"
    )
    loss.backward()
    assert relative(words - rate * words.grad, new0) < FLOAT64
    assert relative(contexts - rate * contexts.grad, new1) < FLOAT64


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"positives": torch.zeros(N - 1, dtype=torch.long)}, "positives: want one for each of N=7"),
        ({"positives": torch.zeros(N)}, "positives: want an integer dtype"),
        ({"negatives": torch.zeros(N, dtype=torch.long)}, r"negatives: want shape \(7, K\)"),
        ({"negatives": torch.zeros(N, K)}, "negatives: want an integer dtype"),
        ({"negatives": torch.full((N, K), M)}, "positives, negatives: want values in 0..10"),
        ({"positives": torch.full((N,), -1)}, "positives, negatives: want values in 0..10"),
        ({"scale": -1.0}, "scale: want a positive number"),
        ({"reduction": "avg"}, "reduction: want one of"),
        ({"candidates": torch.zeros(M, D + 1).double()}, "candidates: want"),
    ],
)
def test_what_cannot_be_taken_is_refused_in_words(changed, said):
    given = dict(zip(("queries", "candidates", "positives", "negatives"), drawn(), strict=True)) | changed
    with pytest.raises((ValueError, TypeError), match=said):
        fastqt.negative_sampling_loss(**given)
