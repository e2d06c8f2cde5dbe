"""Analogies in a streamed pool, against the whole pool in one matrix of float64."""

import numpy as np
import pytest

from fastqt.errors import InputError
from fastqt.sentences.inference.analogy import answers
from fastqt.sentences.text import reader
from tests.shared.sentence_vectors import lines, normalized_halves, vectors

A, B, C = "place0 topic1word1 topic1word2", "place1 topic1word0", "place0 topic7word2"


def cosines_by_definition(encoder, paths, sentences):
    """The cosine of each sentence of the pool to C + B - A, whose halves have norm 1."""
    matrix = normalized_halves(np.concatenate([vectors(encoder, path) for path in paths]))
    a, b, c = normalized_halves(np.stack([encoder.encode([text], normalize=False)[0] for text in sentences]))
    target = c + b - a
    return matrix @ target / np.linalg.norm(target) / np.linalg.norm(matrix, axis=1)


@pytest.mark.parametrize("k", [6, pytest.param(1, marks=pytest.mark.slow), 1000])
def test_answers_agree_with_a_search_of_the_whole_matrix(encoder, planted, monkeypatch, k):
    monkeypatch.setattr(reader, "READ_BYTES", 1000)
    pool = [(file, number, sentence) for file in planted for number, sentence in lines(file)]
    cosines = cosines_by_definition(encoder, planted, (A, B, C))
    found = answers(encoder, A, B, C, planted, k)
    assert len(found) == min(k, len(pool))
    np.testing.assert_allclose([each.cosine for each in found], np.sort(cosines)[::-1][:k], atol=1e-5)
    for each in found:
        assert cosines[pool.index((each.file, each.line, each.sentence))] == pytest.approx(
            each.cosine, abs=1e-5
        )


def test_the_sentences_of_the_question_are_left_out_on_request(encoder, planted, tmp_path):
    text = [sentence for _, sentence in lines(planted[0])]
    a, b, c = text[0], text[7], text[20]
    with_them = answers(encoder, a, b, c, planted, 1000)
    without = answers(encoder, f" {a}", b, c, planted, 1000, exclude=True)
    assert {a, b, c} <= {each.sentence for each in with_them}
    kept = [each for each in with_them if each.sentence not in (a, b, c)]
    places = [{(each.file, each.line) for each in found} for found in (kept, without)]
    assert places[0] == places[1]  # two of nearly equal cosines may change places
    assert [each.cosine for each in kept] == pytest.approx([each.cosine for each in without], abs=1e-6)
    (tmp_path / "three.txt").write_text(f"{a}\n{b}\n{c}\n")
    with pytest.raises(InputError, match=r"nothing to search: no other sentence in .*three\.txt"):
        answers(encoder, a, b, c, [str(tmp_path / "three.txt")], exclude=True)


def test_a_is_to_a_as_c_is_to_c(encoder, planted):
    sentence = lines(planted[0])[9][1]
    (found,) = answers(encoder, A, A, sentence, planted, 1)
    assert found.sentence == sentence
    assert found.cosine == pytest.approx(1, abs=1e-6)


class Opposites:
    """Encodes A, B and C as vectors whose sum C + B - A is 0."""

    def encode(self, sentences):
        return np.array([[1.0, 0], [0.5, 0], [0.5, 0]], dtype=np.float32)[: len(sentences)]


def test_wrong_questions_are_refused(encoder, planted, tmp_path):
    (tmp_path / "empty.txt").touch()
    for arguments, message in (
        ((" ", B, C, planted), "a: want a sentence, got blank text"),
        ((A, B, "gr\udcfcn", planted), r"c: want text in UTF-8, got 'gr\\udcfcn'"),
        ((A, B, C, planted, 0), "k: want at least 1, got 0"),
        ((A, B, C, [str(tmp_path / "empty.txt")]), r"nothing to search: no sentence in .*empty\.txt"),
    ):
        with pytest.raises(InputError, match=message):
            answers(encoder, *arguments)
    with pytest.raises(InputError, match="c: want a sentence for which C \\+ B - A has a direction"):
        answers(Opposites(), A, B, C, planted)
