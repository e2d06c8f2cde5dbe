"""Vectors of all lines in order; streamed searches and analogies beside the whole corpus in one matrix."""

import os
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from fastqt.errors import InputError
from fastqt.sentences.evaluation.encoders import WordVectors
from fastqt.sentences.inference import embed
from fastqt.sentences.inference.embed import write_vectors
from fastqt.sentences.inference.search import answers, nearest
from fastqt.sentences.text import Vocabulary, reader
from tests.shared.sentence_vectors import lines, normalized_halves, vectors
from tests.shared.tokenizer_files import TOKENIZERS

A, B, C = "place0 topic1word1 topic1word2", "place1 topic1word0", "place0 topic7word2"


def assert_nearest(encoder, files, target, found, k):
    """That what was found for a target (D,) are the k sentences of the files at the largest cosines."""
    matrix = normalized_halves(np.concatenate([vectors(encoder, path) for path in files]))
    cosines = matrix @ target / np.linalg.norm(target) / np.linalg.norm(matrix, axis=1)
    pool = [(file, number, sentence) for file in files for number, sentence in lines(file)]
    assert len(found) == min(k, len(pool))
    np.testing.assert_allclose([each.cosine for each in found], np.sort(cosines)[::-1][:k], atol=1e-5)
    for each in found:
        index = pool.index((each.file, each.line, each.sentence))
        assert cosines[index] == pytest.approx(each.cosine, abs=1e-5)
    assert len({(each.file, each.line) for each in found}) == len(found)


@pytest.mark.parametrize("k", [1, 7, 1000])
@pytest.mark.thinned(2)
def test_neighbours_and_answers_are_those_of_the_whole_matrix(encoder, planted, monkeypatch, k):
    """The answer to A, B and C is nearest to C + B - A, whose halves have norm 1."""
    monkeypatch.setattr(reader, "READ_BYTES", 1000)
    queries = ["place3 topic4word1", lines(planted[1])[5][1]]
    for query, found in zip(queries, nearest(encoder, queries, planted, k), strict=True):
        assert_nearest(encoder, planted, encoder.encode([query])[0].astype(np.float64), found, k)
    a, b, c = normalized_halves(encoder.encode([A, B, C], normalize=False))
    assert_nearest(encoder, planted, c + b - a, answers(encoder, A, B, C, planted, k), k)


class ExactEncoder:
    """Returns vectors without rounding errors, so that equal sentences have equal cosines in every block."""

    def encode(self, sentences, **_):
        return np.array([[1, 0] if text == "twin" else [0, 1] for text in sentences], dtype=np.float32)


def test_among_equal_cosines_the_earlier_sentence_comes_first(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "READ_BYTES", 30)
    (tmp_path / "twins.txt").write_text("twin\nother\n" * 9)
    for k in (1, 3, 12):
        (found,) = nearest(ExactEncoder(), ["twin"], [str(tmp_path / "twins.txt")], k)
        assert [neighbor.line for neighbor in found] == [*range(1, 19, 2), 2, 4, 6][:k]


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


class Opposites:
    """Encodes A, B and C as vectors whose sum C + B - A is 0."""

    def encode(self, sentences):
        return np.array([[1.0, 0], [0.5, 0], [0.5, 0]], dtype=np.float32)[: len(sentences)]


def test_wrong_arguments_are_refused(encoder, planted, tmp_path):
    (tmp_path / "empty.txt").touch()
    empty = [str(tmp_path / "empty.txt")]
    for search, arguments, message in (
        (nearest, (["a"], planted, 0), "k: want at least 1, got 0"),
        (nearest, ([" "], planted), "query: want a sentence, got blank text"),
        # The bytes of a command line that are not UTF-8.
        (nearest, (["a", "gr\udcfcn"], planted), r"query: want text in UTF-8, got 'gr\\udcfcn'"),
        (nearest, ([], planted), "query: want at least one sentence, got none"),
        (nearest, (["a"], empty), r"nothing to search: no sentence in .*empty\.txt"),
        (answers, (" ", B, C, planted), "a: want a sentence, got blank text"),
        (answers, (A, B, "gr\udcfcn", planted), r"c: want text in UTF-8, got 'gr\\udcfcn'"),
        (answers, (A, B, C, planted, 0), "k: want at least 1, got 0"),
        (answers, (A, B, C, empty), r"nothing to search: no sentence in .*empty\.txt"),
    ):
        with pytest.raises(InputError, match=message):
            search(encoder, *arguments)
    with pytest.raises(InputError, match="c: want a sentence for which C \\+ B - A has a direction"):
        answers(Opposites(), A, B, C, planted)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_text(encoder, planted, tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "READ_BYTES", 1 << 12)
    peaks = []
    for repeats in (3, 30):
        path = tmp_path / f"{repeats}.txt"
        path.write_text((Path(planted[0]).read_text() + "\n\n") * repeats)
        tracemalloc.start()
        write_vectors(encoder, str(path), tmp_path / "x.npy")
        nearest(encoder, ["place1"], [str(path)])
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 100_000 < (tmp_path / "x.npy").stat().st_size / 2


@pytest.mark.parametrize("normalize", [True, False])
def test_rows_are_the_lines_in_order(encoder, planted, tmp_path, normalize, monkeypatch):
    monkeypatch.setattr(reader, "READ_BYTES", 1000)  # several blocks
    monkeypatch.setattr(embed, "LINES", 7)
    shape = write_vectors(encoder, planted[1], tmp_path / "x.npy", normalize=normalize)
    matrix = np.load(tmp_path / "x.npy")
    wanted = vectors(encoder, planted[1])
    if normalize:
        wanted = normalized_halves(wanted)
    sentences = [bool(line) for line in Path(planted[1]).read_text().split("\n")]
    assert matrix.dtype == np.float32
    assert matrix.shape == shape == (len(sentences), wanted.shape[1])
    assert sum(sentences) < len(sentences)
    np.testing.assert_allclose(matrix[sentences], wanted, rtol=1e-5, atol=1e-6)
    assert not matrix[np.logical_not(sentences)].any()
    assert {path.name for path in tmp_path.iterdir()} == {"x.npy", "planted.txt", "held_out.txt"}


@pytest.mark.parametrize("end", ["", "\n", "\n\n", "\n \t\n"])
@pytest.mark.parametrize("begin", ["", "\n", "\ufeff", "\ufeff\n"])
@pytest.mark.parametrize("read_bytes", [3, 1000])
def test_there_are_as_many_rows_as_lines(encoder, tmp_path, begin, end, read_bytes, monkeypatch):
    """Blank lines count wherever they are, and so does a last line without a line feed."""
    monkeypatch.setattr(reader, "READ_BYTES", read_bytes)
    text = tmp_path / "text.txt"
    text.write_text(f"{begin}place1\r\n\n  \nplace2{end}", encoding="utf-8", newline="")
    with text.open(encoding="utf-8-sig", newline="\n") as file:
        stripped = [line.strip() for line in file]
    write_vectors(encoder, str(text), tmp_path / "x.npy")
    matrix = np.load(tmp_path / "x.npy")
    assert matrix.any(axis=1).tolist() == [bool(line) for line in stripped]
    place1, place2 = encoder.encode(["place1", "place2"])
    np.testing.assert_allclose(matrix[stripped.index("place1")], place1, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(matrix[stripped.index("place2")], place2, rtol=1e-5, atol=1e-6)


def test_embedding_a_failing_text_leaves_what_was_there(encoder, tmp_path):
    (tmp_path / "x.npy").write_text("before")
    for text, message in ((b"fine\n\xff\n", "not UTF-8"), (b"\n\n", "nothing to embed: no sentence in ")):
        (tmp_path / "text.txt").write_bytes(text)
        with pytest.raises(InputError, match=message):
            write_vectors(encoder, str(tmp_path / "text.txt"), tmp_path / "x.npy")
        assert (tmp_path / "x.npy").read_text() == "before"
        assert {path.suffix for path in tmp_path.iterdir()} == {".npy", ".txt"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent/x.npy", r"cannot write .*absent/x\.npy: No such file or directory"),
        ("x.npz", r"x\.npz: want a name that ends in \.npy, got \.npz$"),
        ("x", r"x: want a name that ends in \.npy, got no ending$"),
    ],
)
def test_an_output_that_cannot_be_written_or_has_another_format(encoder, planted, tmp_path, name, message):
    with pytest.raises(InputError, match=message):
        write_vectors(encoder, planted[1], tmp_path / name)
    assert not (tmp_path / name).exists()


def test_a_text_is_read_from_a_fifo(encoder, planted, tmp_path):
    write_vectors(encoder, planted[1], tmp_path / "x.npy")
    os.mkfifo(tmp_path / "source")
    text = Path(planted[1]).read_bytes()
    threading.Thread(target=lambda: (tmp_path / "source").write_bytes(text), daemon=True).start()
    write_vectors(encoder, str(tmp_path / "source"), tmp_path / "y.npy")
    assert (tmp_path / "y.npy").read_bytes() == (tmp_path / "x.npy").read_bytes()


def test_one_text_has_one_vector_and_no_text_none(encoder):
    found = encoder.encode(["place3", "place2 topic7word0"])
    for text, vector in zip(["place3", "place2 topic7word0"], found, strict=True):
        np.testing.assert_allclose(encoder.encode(text), vector, atol=1e-6)
    assert encoder.encode([]).shape == (0, encoder.model.embedding_dim)
    assert np.array_equal(encoder.encode(iter(["place3", "place2 topic7word0"])), found)
    words = WordVectors(["good", "film"], np.eye(2))
    assert words("A good film").tolist() == [0.5, 0.5]
    assert words([]).shape == (0, 2)


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
    sub_words = Vocabulary(TOKENIZERS["bpe"]())
    uses = [encoder.vocabulary.encode, sub_words.encode, lambda texts: nearest(encoder, texts, planted)]
    for use in uses if isinstance(texts, str) else [*uses, encoder.encode]:
        with pytest.raises(error, match=message):
            use(texts)
    assert np.array_equal(encoder.encode(["a cat"]), wanted)
