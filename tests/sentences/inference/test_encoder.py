"""What an encoder takes for texts, as users of sentence-transformers know it."""

import numpy as np
import pytest

from fastqt.errors import InputError
from fastqt.sentences.evaluation import SIF, WordVectors
from fastqt.sentences.inference.search import nearest
from fastqt.sentences.text import TokenizerVocabulary
from tests.shared.tokenizer_files import TOKENIZERS


def test_one_text_has_one_vector_and_no_text_none(encoder):
    vectors = encoder.encode(["place3", "place2 topic7word0"])
    for text, vector in zip(["place3", "place2 topic7word0"], vectors, strict=True):
        np.testing.assert_allclose(encoder.encode(text), vector, atol=1e-6)
    assert encoder.encode([]).shape == (0, encoder.model.embedding_dim)
    assert np.array_equal(encoder.encode(iter(["place3", "place2 topic7word0"])), vectors)
    words = WordVectors(["good", "film"], np.eye(2))
    assert words("A good film").tolist() == [0.5, 0.5]
    assert words([]).shape == (0, 2)
    assert SIF(["a"], np.eye(1), np.array([1])).encode([]).shape == (0, 1)


@pytest.mark.parametrize(
    ("texts", "error", "message"),
    [
        ("a cat", TypeError, "want a list of texts, got 'a cat'"),
        (None, TypeError, "want a list of texts, got None"),
        (["a cat", None], TypeError, "want texts, got None"),
        (["a cat", "a \ud800"], InputError, r"want text in UTF-8, got 'a \\ud800'"),
    ],
    ids=["one text", "nothing", "none", "half a character"],
)
def test_what_is_no_list_of_texts_is_refused_and_breaks_nothing(encoder, planted, texts, error, message):
    wanted = encoder.encode(["a cat"])
    sub_words = TokenizerVocabulary(TOKENIZERS["bpe"]())
    for use in (encoder.vocabulary.encode, sub_words.encode, lambda texts: nearest(encoder, texts, planted)):
        with pytest.raises(error, match=message):
            use(texts)
    if not isinstance(texts, str):
        with pytest.raises(error, match=message):
            encoder.encode(texts)
    assert np.array_equal(encoder.encode(["a cat"]), wanted)
