"""Searches of an index, compared with the exact search of the corpus and with numpy."""

from pathlib import Path

import numpy as np
import pytest

from fastqt.errors import InputError
from fastqt.sentences.inference.index import Index, IndexOptions, build_index
from fastqt.sentences.inference.search import nearest
from tests.shared.clustered import Clustered, write_corpus

KINDS = ["flat", "ivf", "hnsw"]
ROWS = 1500


@pytest.fixture(scope="module")
def encoder():
    return Clustered(ROWS)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    return [*write_corpus(folder / "a.txt", range(1000)), *write_corpus(folder / "b.txt", range(1000, ROWS))]


@pytest.fixture(scope="module")
def indexes(encoder, corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("indexes")
    for kind in KINDS:
        build_index(encoder, corpus, folder / f"{kind}.index", IndexOptions(kind=kind))
    return {kind: Index(folder / f"{kind}.index") for kind in KINDS}


def cosines(encoder, queries):
    unit = encoder.matrix.astype(np.float64)
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    return unit[queries] @ unit.T


@pytest.mark.parametrize("k", [1, 5, ROWS, 10 * ROWS])
def test_flat_finds_what_the_exact_search_finds(encoder, corpus, indexes, k):
    queries = ["one 3", "two 1200"]
    found = indexes["flat"].search(encoder, queries, k)
    wanted = nearest(encoder, queries, corpus, k)
    assert [[each[1:] for each in row] for row in found] == [[each[1:] for each in row] for row in wanted]
    np.testing.assert_allclose(
        [[each.cosine for each in row] for row in found],
        [[each.cosine for each in row] for row in wanted],
        atol=1e-6,
    )


def test_a_real_model_finds_the_same_with_its_index(encoder_of_words, planted, tmp_path):
    index = build_index(encoder_of_words, planted, tmp_path / "x.index", IndexOptions(kind="flat"))
    queries = ["place3 topic4word1", "place2 topic7word0 topic7word2"]
    for found, wanted in zip(
        index.search(encoder_of_words, queries, 7),
        nearest(encoder_of_words, queries, planted, 7),
        strict=True,
    ):
        np.testing.assert_allclose([x.cosine for x in found], [x.cosine for x in wanted], atol=1e-6)
        assert {x.sentence for x in found} == {x.sentence for x in wanted}


@pytest.mark.parametrize("kind", ["ivf", "hnsw"])
def test_recall_is_what_it_says_and_what_was_wanted(encoder, indexes, kind):
    """Of all rows as queries, counted by their numbers: it shares no code with how an index measures it."""
    index = indexes[kind]
    exact = cosines(encoder, np.arange(ROWS))
    np.fill_diagonal(exact, -np.inf)
    wanted = np.argsort(-exact, axis=1)[:, :10]
    _, rows = index.search_vectors(encoder.matrix / np.linalg.norm(encoder.matrix, axis=1, keepdims=True), 11)
    recall = np.mean([len(set(row) & set(other)) / 10 for row, other in zip(rows, wanted, strict=True)])
    assert index.recall.queries == 1000
    assert index.recall.at == 10
    assert index.recall.value >= 0.95
    assert abs(recall - index.recall.value) < 0.02
    if kind == "ivf":
        assert index.effort < index.searcher.most_effort / 2  # or it would be a flat index in disguise


@pytest.mark.parametrize("kind", KINDS)
def test_cosines_belong_to_their_rows(encoder, indexes, kind):
    unit = encoder.matrix / np.linalg.norm(encoder.matrix, axis=1, keepdims=True)
    scores, rows = indexes[kind].search_vectors(unit[:50], 20)
    exact = cosines(encoder, np.arange(50))
    np.testing.assert_allclose(scores, np.take_along_axis(exact, rows, 1), atol=1e-6)
    assert (np.diff(scores, axis=1) <= 0).all()
    assert all(len(set(row)) == 20 for row in rows)


@pytest.mark.parametrize("kind", KINDS)
def test_as_many_sentences_as_there_are(encoder, corpus, indexes, kind):
    """However few lists a search reads, or rows it keeps in sight."""
    (found,) = indexes[kind].search(encoder, ["7"], 2 * ROWS)
    assert len({(x.file, x.line) for x in found}) == len(found) == ROWS
    assert found[0].sentence == "zażółć 句 7"
    lines = {file: Path(file).read_text(encoding="utf-8").split("\n") for file in corpus}
    assert all(lines[x.file][x.line - 1] == x.sentence for x in found)


def test_more_effort_finds_more(encoder, indexes):
    unit = encoder.matrix / np.linalg.norm(encoder.matrix, axis=1, keepdims=True)
    index = indexes["ivf"]
    sums = [index.search_vectors(unit, 10, effort)[0].sum() for effort in (1, 4, 10**6)]
    assert sums[0] < sums[1] < sums[2]
    exact = -np.sort(-cosines(encoder, np.arange(ROWS)), axis=1)[:, :10]
    assert sums[2] == pytest.approx(exact.sum(), rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_sentences_are_all_found(tmp_path, kind):
    """A thousand times the same sentence, which a graph can not tell apart."""
    encoder = Clustered(400)
    corpus = write_corpus(tmp_path / "same.txt", [7] * 1000 + list(range(400)))
    index = build_index(encoder, corpus, tmp_path / "x.index", IndexOptions(kind=kind, min_recall=0.5))
    (found,) = index.search(encoder, ["7"], 1001)
    assert [x.sentence for x in found] == ["zażółć 句 7"] * 1001
    (found,) = index.search(encoder, ["9"], 1400)
    assert len({x.line for x in found}) == 1400


@pytest.mark.parametrize("kind", KINDS)
def test_the_smallest_corpora(tmp_path, kind):
    for rows in (1, 2, 12):
        encoder, corpus = Clustered(rows), write_corpus(tmp_path / "few.txt", range(rows))
        index = build_index(encoder, corpus, tmp_path / "x.index", IndexOptions(kind=kind, min_recall=1))
        (found,) = index.search(encoder, ["0"])
        assert len(found) == min(rows, 5)
        assert found[0].line == 1
        assert index.recall.value == 1


def test_the_corpus_may_move_but_not_change(encoder, corpus, indexes, tmp_path):
    index = indexes["flat"]
    moved = [
        *write_corpus(tmp_path / "x.txt", range(1000)),
        *write_corpus(tmp_path / "y.txt", range(1000, ROWS)),
    ]
    index.check_corpus(moved)
    for other in (
        moved[:1],
        moved[::-1],
        [moved[0], *write_corpus(tmp_path / "z.txt", [*range(1000, ROWS - 1), 3])],
    ):
        with pytest.raises(InputError, match=r"was made from another corpus than .*x\.txt|z\.txt"):
            index.check_corpus(other)


def test_another_model_is_refused(encoder, indexes):
    other = Clustered(ROWS, seed=1)
    for other.digest in ("other", None):
        with pytest.raises(InputError, match=r"flat\.index was made by another model"):
            indexes["flat"].search(other, ["1"])
    with pytest.raises(InputError, match=r"queries: want vectors of width 16, got shape \(1, 17\)"):
        indexes["flat"].search_vectors(np.zeros((1, 17), np.float32), 1)


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_arguments_of_a_search_are_refused(encoder, indexes, kind):
    with pytest.raises(InputError, match="k: want at least 1, got 0"):
        indexes[kind].search(encoder, ["1"], 0)
    with pytest.raises(InputError, match="query: want a sentence, got blank text"):
        indexes[kind].search(encoder, [" "])
    with pytest.raises(InputError, match="effort: want at least 1, got 0"):
        indexes[kind].search_vectors(encoder.matrix[:1], 1, 0)
