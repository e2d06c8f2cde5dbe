"""The vocabulary against a plain implementation, and against the `tokenizers` library."""

import string
import unicodedata
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastqt.errors import InputError
from fastqt.sentences.text import Vocabulary, counting, vocabulary

ALPHABET = "abAB zé-'.,;—“”…$_9\t\u00a0\u3000四"
SENTENCES = st.lists(st.text(ALPHABET, max_size=30), max_size=20)


def split(sentence):
    """Splits at white space; each punctuation mark and each ASCII symbol is a word of its own."""
    spaced = "".join(
        f" {c} " if c in string.punctuation or unicodedata.category(c).startswith("P") else c
        for c in sentence
    )
    return spaced.split()


def oracle(corpus, size, sentence, unknown="keep", max_length=50):
    counts = Counter(word for line in corpus for word in split(line))
    ranked = sorted(counts, key=lambda word: (-counts[word], word))[: size - 1]
    ids = {word: number for number, word in enumerate(ranked, start=1)}
    encoded = [ids.get(word, 0) for word in split(sentence)]
    if unknown == "drop":
        encoded = [number for number in encoded if number]
    return encoded[:max_length] or [0]


def encode(vocabulary, sentences):
    ids, lengths = vocabulary.encode(sentences)
    assert lengths.sum() == len(ids)
    ends = lengths.cumsum()
    return [ids[end - length : end].tolist() for end, length in zip(ends, lengths, strict=True)]


@given(SENTENCES, SENTENCES, st.integers(2, 12), st.sampled_from(["keep", "drop"]), st.integers(1, 6))
def test_ids_equal_a_plain_implementation(corpus, sentences, size, unknown, max_length):
    built = Vocabulary.build(corpus, size, unknown=unknown, max_length=max_length)
    wanted = [oracle(corpus, size, sentence, unknown, max_length) for sentence in sentences]
    assert encode(built, sentences) == wanted
    assert encode(built, sentences[::-1]) == wanted[::-1]


@given(SENTENCES)
def test_ids_equal_those_of_the_tokenizers_library(sentences):
    built = Vocabulary.build(sentences[: len(sentences) // 2], 12, max_length=1000)
    for sentence, ids in zip(sentences, encode(built, sentences), strict=True):
        assert ids == (built.tokenizer.encode(sentence).ids or [0])


@settings(max_examples=20)
@given(SENTENCES, SENTENCES)
def test_full_cache_does_not_change_ids(corpus, sentences):
    built = Vocabulary.build(corpus, 12)
    wanted = encode(built, sentences)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocabulary, "CACHED_CHUNKS", 2)
        for _ in range(2):
            assert [encode(built, [sentence])[0] for sentence in sentences] == wanted
        built.encode(["new"])
        built.encode(["newer"])
        assert len(built._cache) <= 4


def test_counting_in_parts_gives_the_same_vocabulary(monkeypatch):
    corpus = [f"word{n % 7} and, word{n % 3}." for n in range(50)]
    whole = Vocabulary.build(corpus, 100).to_json()
    monkeypatch.setattr(counting, "COUNTED_CHUNKS", 2)
    assert Vocabulary.build(corpus, 100).to_json() == whole


def test_rarest_words_are_dropped_when_there_are_too_many(monkeypatch):
    monkeypatch.setattr(counting, "COUNTED_CHUNKS", 50)
    monkeypatch.setattr(counting, "COUNTED_WORDS", 100)
    corpus = [f"often sometimes{n % 4} once{n}" for n in range(2000)]
    words = counting.count_words(corpus, limit=100)
    assert len(words) <= 100 + 50
    assert [words[w] for w in ("often", "sometimes0", "sometimes3")] == [2000, 500, 500]


@pytest.mark.parametrize("unknown", ["keep", "drop"])
def test_saved_vocabulary_loads_unchanged(tmp_path, unknown):
    built = Vocabulary.build(["one two two", "three, four"], 5, unknown=unknown, max_length=3)
    built.save(tmp_path / "v.json")
    loaded = Vocabulary.load(tmp_path / "v.json", unknown=unknown)
    sentences = ["two one", "nine", "two four , three two one"]
    assert encode(loaded, sentences) == encode(built, sentences)
    assert len(loaded) == len(built) == 5
    assert loaded.to_json() == built.to_json()


def test_very_long_words_are_unknown():
    built = Vocabulary.build(["x" * 101, "y" * 100], 10)
    assert encode(built, ["x" * 101 + " " + "y" * 100]) == [[0, 1]]


def test_wrong_options_are_refused():
    for arguments, message in (({"size": 1}, "vocab_size: want at least 2"),):
        with pytest.raises(InputError, match=message):
            Vocabulary.build(["a"], **arguments)
    with pytest.raises(TypeError, match="sentences: want texts, got one text, 'a cat'"):
        Vocabulary.build("a cat")
