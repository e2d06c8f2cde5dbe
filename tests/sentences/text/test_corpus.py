"""A corpus in memory: each pass has every sentence once, in an order that depends on seed and epoch."""

import numpy as np
import pytest
import torch

from fastqt.sentences.text import Corpus, Vocabulary, batches


@pytest.fixture
def text(planted):
    with open(planted[0]) as file:
        return planted[0], Vocabulary.build(line for line in file if line.strip())


def test_sentences_equal_those_of_the_stream(text):
    path, vocabulary = text
    corpus = Corpus([path, path], vocabulary)
    assert len(corpus) == 960
    streamed = next(batches([path], vocabulary, 480))
    ordered = {}
    for sample in map(corpus.sample, np.split(corpus.order(seed=1, epoch=0), 20)):
        assert sample.tokens.shape == (len(sample.rows), sample.lengths.max())
        for row, tokens, length in zip(sample.rows.tolist(), sample.tokens, sample.lengths, strict=True):
            assert not tokens[length:].any()
            ordered[row] = tokens[:length]
    assert sorted(ordered) == list(range(960))
    for row, words in ordered.items():
        length = streamed.lengths[row % 480]
        assert torch.equal(words, streamed.tokens[row % 480, :length])


def test_order_depends_on_seed_and_epoch(text):
    path, vocabulary = text
    corpus = Corpus([path], vocabulary)
    order = corpus.order(seed=1, epoch=2).tolist()
    assert sorted(order) == list(range(480))
    assert order == Corpus([path], vocabulary).order(seed=1, epoch=2).tolist()
    assert corpus.order(seed=1, epoch=3).tolist() != order != corpus.order(seed=2, epoch=2).tolist()
