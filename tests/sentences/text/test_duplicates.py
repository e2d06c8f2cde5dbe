"""Orders in which no batch has a text twice."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastqt.sentences.text.duplicates import apart, fingerprints, repeating_rows


def batches(order, size):
    return [order[begin : begin + size] for begin in range(0, len(order), size)]


def repeats(order, texts, size):
    """Whether a batch has two rows with a text in common, by comparing all of them."""
    return any(
        set(texts[a].tolist()) & set(texts[b].tolist())
        for batch in batches(order, size)
        for i, a in enumerate(batch)
        for b in batch[:i]
    )


def test_equal_texts_have_equal_fingerprints_in_every_process():
    ours = fingerprints(["a dog", " a dog ", "A dog", "ä", "\ud800"])
    assert ours.dtype == np.uint64
    assert ours[0] == ours[1]
    assert len(set(ours.tolist())) == 4
    assert ours[0] == 0xC75A225A66E602FE  # the first 8 bytes of BLAKE2b(digest_size=8), little-endian


@given(st.data())
def test_an_order_is_that_of_all_rows_and_stays_where_nothing_repeats(data):
    rows, width, size = (data.draw(st.integers(1, most)) for most in (40, 3, 9))
    texts = np.array(data.draw(st.lists(st.integers(0, 30), min_size=rows * width, max_size=rows * width)))
    texts = texts.reshape(rows, width).astype(np.uint64)
    order = np.random.default_rng(rows).permutation(rows)
    arranged = apart(order, texts, size)
    assert sorted(arranged.tolist()) == list(range(rows))
    if not repeats(order, texts, size):
        assert arranged.tolist() == order.tolist()
    whole = batches(arranged, size)
    assert repeating_rows(whole, texts)[1] == rows
    assert (repeating_rows(whole, texts)[0] > 0) == repeats(arranged, texts, size)


@pytest.mark.parametrize("size", [8, 64])
def test_consecutive_sentences_are_kept_apart(size):
    """Of which each is the positive of one row and the query of the next, and some come back."""
    sentences = np.random.default_rng(0).integers(0, 1500, 2001).astype(np.uint64)
    texts = np.stack([sentences[:-1], sentences[1:]], 1)
    order = np.arange(2000)
    assert repeats(order, texts, size)
    arranged = apart(order, texts, size)
    assert not repeats(arranged[: 1900 // size * size], texts, size)


def test_a_text_of_most_rows_takes_bounded_time_and_loses_no_row():
    texts = np.stack([np.zeros(20_000, np.uint64), np.arange(1, 20_001, dtype=np.uint64)], 1)
    arranged = apart(np.arange(20_000), texts, 16)
    assert sorted(arranged.tolist()) == list(range(20_000))


def test_a_row_may_have_a_text_twice_itself():
    texts = np.array([[1, 1], [2, 2], [3, 1]], dtype=np.uint64)
    assert repeating_rows([np.array([0, 1])], texts) == (0, 2)
    assert repeating_rows([np.array([0, 1, 2])], texts) == (2, 3)
