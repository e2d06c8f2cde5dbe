"""The shares of word pairs and triples tell text from the same words without its order."""

from benchmarks.papers.phrases import Phrases, by_position, in_another_order, ngrams

TEXT = [["he", "saw", "her", "."], ["she", "saw", "the", "sea", "."]]


def test_pairs_and_triples_begin_before_the_sentence():
    assert ngrams(["a", "b", "."], 2) == [("", "a"), ("a", "b"), ("b", ".")]
    assert ngrams(["a", "b", "."], 3) == [("", "a", "b"), ("a", "b", ".")]


def test_shares_of_pairs_and_triples():
    phrases = Phrases(TEXT)
    assert phrases.shares(TEXT) == {"pairs": 1.0, "triples": 1.0, "whole": 1.0, "repeats": 0.0}
    # All pairs of the first sentence are known; of its four triples "he saw the" is not.
    assert phrases.shares([["he", "saw", "the", "sea", "."]]) == {
        **{"pairs": 1.0, "triples": 3 / 4, "whole": 1.0, "repeats": 0.0}
    }
    mixed = phrases.shares([[".", "her", "saw", "he"], ["he", "saw", "saw", "her", "."]])
    # The second sentence has four of its five pairs, and of its four triples the first and the last.
    assert mixed == {"pairs": 4 / 9, "triples": 2 / 7, "whole": 0.0, "repeats": 1 / 2}


def test_another_order_keeps_the_words_and_the_full_stop():
    sentences = [[*"abcdefgh", "."]] * 20
    shuffled = in_another_order(sentences)
    assert all(sorted(words) == sorted(sentences[0]) and words[-1] == "." for words in shuffled)
    assert len({tuple(words) for words in shuffled}) == 20
    assert shuffled == in_another_order(sentences)


def test_words_drawn_by_position_are_those_of_the_position():
    lengths = [4, 5, 5, 4] * 10
    drawn = by_position([*TEXT, ["it", "was", "late", "."]], lengths)
    assert [len(words) for words in drawn] == lengths
    assert {words[0] for words in drawn if len(words) == 5} == {"she"}
    assert {(words[0], words[1]) for words in drawn if len(words) == 4} > {("he", "saw"), ("it", "was")}
    assert ("he", "was") in {(words[0], words[1]) for words in drawn}, "each position for itself"
