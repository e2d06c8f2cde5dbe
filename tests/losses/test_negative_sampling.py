"""Negative sampling equals its definition, word2vec's update, and refuses what it cannot take."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fastqt
from tests.shared.loss_views import check
from tests.shared.tolerances import FLOAT64, relative

N, M, D, K = 7, 11, 5, 4


def drawn(dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    f, g = (torch.randn(n, D, generator=generator, dtype=torch.float64) for n in (N, M))
    positives = torch.randint(M, (N,), generator=generator)
    negatives = torch.randint(M, (N, K), generator=generator)
    return f.to(dtype).requires_grad_(), g.to(dtype).requires_grad_(), positives, negatives


@pytest.mark.parametrize("chunk", [2**20, 3 * (1 + K) * D * 8])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_is_the_definition(reduction, chunk, monkeypatch):
    monkeypatch.setattr("fastqt.losses.negative_sampling.CHUNK_BYTES", chunk)
    f, g, positives, negatives = drawn()
    scale = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    found = fastqt.negative_sampling_loss(f, g, positives, negatives, scale=scale, reduction=reduction)
    others = scale * (g[negatives] @ f[:, :, None]).squeeze(2)
    cells = F.softplus(others).masked_fill(negatives == positives[:, None], 0)
    rows = F.softplus(-scale * (f * g[positives]).sum(1)) + cells.sum(1)
    check(found, rows if reduction == "none" else getattr(rows, reduction)(), [f, g, scale])


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
        ({"candidates": torch.zeros(M, D + 1).double()}, "candidates: want"),
    ],
)
def test_what_cannot_be_taken_is_refused_in_words(changed, said):
    given = dict(zip(("queries", "candidates", "positives", "negatives"), drawn(), strict=True)) | changed
    with pytest.raises((ValueError, TypeError), match=said):
        fastqt.negative_sampling_loss(**given)
