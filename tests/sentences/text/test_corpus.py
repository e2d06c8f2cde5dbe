"""A corpus in memory: each pass yields every sentence once, in an order that depends on seed and epoch."""

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
    for sample in corpus.shuffled(50, seed=1, epoch=0):
        assert sample.tokens.shape == (len(sample.rows), sample.lengths.max())
        for row, tokens, length in zip(sample.rows.tolist(), sample.tokens, sample.lengths, strict=True):
            assert not tokens[length:].any()
            ordered[row] = tokens[:length]
    assert sorted(ordered) == list(range(960))
    for row, words in ordered.items():
        length = streamed.lengths[row % 480]
        assert torch.equal(words, streamed.tokens[row % 480, :length])


def test_order_depends_on_seed_and_epoch_and_a_pass_can_be_resumed(text):
    path, vocabulary = text
    corpus = Corpus([path], vocabulary)

    def rows(**options):
        return [sample.rows.tolist() for sample in corpus.shuffled(100, **options)]

    whole = rows(seed=1, epoch=2)
    assert [len(each) for each in whole] == [100, 100, 100, 100, 80]
    assert rows(seed=1, epoch=2, first=3) == whole[3:]
    assert rows(seed=1, epoch=2, smallest=81) == whole[:4]
    assert rows(seed=1, epoch=3) != whole != rows(seed=2, epoch=2)
