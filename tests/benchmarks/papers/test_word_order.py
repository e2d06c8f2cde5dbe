"""The limit of additive scores is 1 where words have places, and less where two sentences contradict."""

from benchmarks.papers.word_order import order_limit


def test_words_with_places_of_their_own():
    sentences = [[a, "saw", b, "."] for a in ("he", "she") for b in ("them", "us")] + [["it", "is", "."]]
    assert order_limit(sentences, steps=100) == 1.0


def test_the_same_words_in_two_orders():
    # Whatever is right in one of the first two sentences is wrong in the other.
    sentences = [["john", "saw", "mary"], ["mary", "saw", "john"], ["he", "saw", "her"]]
    assert order_limit(sentences, steps=100) == 7 / 9


def test_a_word_at_both_ends_and_another_between():
    # A word that wins the first and the last position may lose the one between.
    assert order_limit([["a", "b", "a"]] * 2, steps=100) == 1.0
