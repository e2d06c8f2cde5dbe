"""Searches of an index beside the exact search and numpy; making one: refusals, failures, damage."""

import gzip
import os
import random
from pathlib import Path

import numpy as np
import pytest

from fastqt.errors import InputError
from fastqt.sentences.inference import index as index_module
from fastqt.sentences.inference.index import Index, IndexOptions, build_index
from fastqt.sentences.inference.search import nearest
from tests.shared.clustered import Clustered, write_corpus

KINDS = ["flat", "ivf"]
ROWS = 1500


@pytest.fixture(scope="module", autouse=True)
def one_thread_of_faiss():
    """Its threads wait actively, as those of torch do: on a busy machine small searches would be slow."""
    faiss = pytest.importorskip("faiss", reason="the extra faiss is not installed")
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    yield
    faiss.omp_set_num_threads(before)


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


@pytest.mark.parametrize("kind", KINDS)
def test_faiss_reads_the_file(encoder, indexes, kind):
    faiss = pytest.importorskip("faiss", reason="the extra faiss is not installed")
    read = faiss.read_index(str(indexes[kind].path))
    if kind == "ivf":
        read.nprobe = indexes[kind].effort
    scores, rows = read.search(unit(encoder)[:50], 5)
    wanted, wanted_rows = indexes[kind].search_vectors(unit(encoder)[:50], 5)
    np.testing.assert_allclose(scores, wanted, atol=1e-6)
    assert (rows == wanted_rows).mean() > 0.99  # equal cosines may change places
    assert read.ntotal == ROWS


def unit(encoder):
    return encoder.matrix / np.linalg.norm(encoder.matrix, axis=1, keepdims=True)


def cosines(encoder, queries):
    vectors = encoder.matrix.astype(np.float64)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors[queries] @ vectors.T


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


def test_recall_is_what_it_says_and_what_was_wanted(encoder, indexes):
    """Of all rows as queries, counted by their numbers: it shares no code with how an index measures it."""
    index = indexes["ivf"]
    exact = cosines(encoder, np.arange(ROWS))
    np.fill_diagonal(exact, -np.inf)
    wanted = np.argsort(-exact, axis=1)[:, :10]
    _, rows = index.search_vectors(unit(encoder), 11)
    recall = np.mean([len(set(row) & set(other)) / 10 for row, other in zip(rows, wanted, strict=True)])
    assert index.recall.queries == 1000
    assert index.recall.at == 10
    assert index.recall.value >= 0.95
    assert abs(recall - index.recall.value) < 0.02
    assert index.effort < index.searcher.most_effort / 2  # or it would be a flat index in disguise


@pytest.mark.parametrize("kind", KINDS)
def test_cosines_belong_to_their_rows(encoder, indexes, kind):
    scores, rows = indexes[kind].search_vectors(unit(encoder)[:50], 20)
    exact = cosines(encoder, np.arange(50))
    np.testing.assert_allclose(scores, np.take_along_axis(exact, rows, 1), atol=1e-6)
    assert (np.diff(scores, axis=1) <= 0).all()
    assert all(len(set(row)) == 20 for row in rows)


@pytest.mark.parametrize("kind", KINDS)
def test_as_many_sentences_as_there_are(encoder, corpus, indexes, kind):
    """However few lists a search reads."""
    (found,) = indexes[kind].search(encoder, ["7"], 2 * ROWS)
    assert len({(x.file, x.line) for x in found}) == len(found) == ROWS
    assert found[0].sentence == "zażółć 句 7"
    lines = {file: Path(file).read_text(encoding="utf-8").split("\n") for file in corpus}
    assert all(lines[x.file][x.line - 1] == x.sentence for x in found)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_sentences_are_all_found(tmp_path, kind):
    """A thousand times the same sentence."""
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


@pytest.mark.parametrize("kind", KINDS)
def test_another_model_and_wrong_arguments_of_a_search_are_refused(encoder, indexes, kind):
    other, index = Clustered(ROWS, seed=1), indexes[kind]
    for other.identity in ("other", None):
        with pytest.raises(InputError, match=rf"{kind}\.index was made by another model"):
            index.search(other, ["1"])
    with pytest.raises(InputError, match=r"queries: want vectors of width 16, got shape \(1, 17\)"):
        index.search_vectors(np.zeros((1, 17), np.float32), 1)
    with pytest.raises(InputError, match="k: want at least 1, got 0"):
        index.search(encoder, ["1"], 0)
    with pytest.raises(InputError, match="query: want a sentence, got blank text"):
        index.search(encoder, [" "])


def test_wrong_options_are_refused():
    for options, message in (({"lists": 3}, "lists: want them for kind ivf alone, got 3 for auto"),):
        with pytest.raises(InputError, match=message):
            IndexOptions(**options)


def test_what_cannot_be_indexed_leaves_what_was_there(tmp_path):
    encoder, out = Clustered(40), tmp_path / "x.index"
    out.write_text("before")
    corpus = write_corpus(tmp_path / "corpus.txt", range(40))
    (tmp_path / "blank.txt").write_text("\n\n")
    (tmp_path / "latin.txt").write_bytes(b"fine 1\n\xff\n")
    for model, texts, options, message in (
        (encoder, [str(tmp_path / "blank.txt")], {}, r"nothing to index: no sentence in .*blank\.txt"),
        (encoder, [str(tmp_path / "latin.txt")], {}, "line 2 is not UTF-8"),
        (encoder, corpus, {"kind": "ivf", "lists": 41}, "lists: want at most 40, the number of sentences"),
    ):
        with pytest.raises(InputError, match=message):
            build_index(model, texts, out, IndexOptions(**options))
        assert out.read_text() == "before"
        assert {path.suffix for path in tmp_path.iterdir()} == {".index", ".txt"}


def test_outputs_that_cannot_be_written(tmp_path):
    encoder, corpus = Clustered(5), write_corpus(tmp_path / "corpus.txt", range(5))
    os.mkfifo(tmp_path / "fifo")
    for out, message in (
        ("x.faiss", r"x\.faiss: want a name that ends in \.index, got \.faiss"),
        ("absent/x.index", r"cannot write .*absent is not a directory"),
        ("fifo", "fifo: want a regular file"),
    ):
        with pytest.raises(InputError, match=message):
            build_index(encoder, corpus, tmp_path / out)


def test_the_kind_follows_from_the_size(tmp_path, monkeypatch):
    monkeypatch.setattr(index_module, "FLAT_ROWS", 100)
    encoder = Clustered(100)
    for rows, kind in ((99, "flat"), (100, "ivf")):
        corpus = write_corpus(tmp_path / "corpus.txt", range(rows))
        assert build_index(encoder, corpus, tmp_path / "x.index").kind == kind


@pytest.mark.parametrize("min_recall", [0.5, 0.9, 0.99, 1])
def test_the_least_effort_is_chosen(tmp_path, min_recall):
    """All sentences are asked here, so that the recall of a search with one list less can be counted."""
    encoder, corpus = Clustered(900), write_corpus(tmp_path / "corpus.txt", range(900))
    options = IndexOptions(kind="ivf", lists=90, min_recall=min_recall)
    index = build_index(encoder, corpus, tmp_path / "x.index", options)
    exact = cosines(encoder, np.arange(900))
    np.fill_diagonal(exact, -np.inf)
    least = np.sort(exact, axis=1)[:, -10:-9] - 1e-5

    def recall(effort):
        index.effort = effort
        scores, rows = index.search_vectors(unit(encoder), 11)
        return ((scores >= least) & (rows != np.arange(900)[:, None])).sum(axis=1).clip(max=10).mean() / 10

    chosen = index.effort
    assert index.recall.queries == 900
    assert recall(chosen) == pytest.approx(index.recall.value)
    assert index.recall.value >= min_recall
    assert chosen == 1 or recall(chosen - 1) < min_recall


def test_a_compressed_corpus_makes_the_same_index(tmp_path):
    encoder = Clustered(900)
    corpus = write_corpus(tmp_path / "corpus.txt", range(900))
    (tmp_path / "corpus.txt.gz").write_bytes(gzip.compress(Path(corpus[0]).read_bytes()))
    plain, packed = (
        build_index(encoder, [name], tmp_path / "x.index") for name in (corpus[0], f"{corpus[0]}.gz")
    )
    (one,), (other,) = plain.search(encoder, ["11"], 3), packed.search(encoder, ["11"], 3)
    assert [(x.cosine, x.line) for x in one] == [(x.cosine, x.line) for x in other]
    assert other[0].file == f"{corpus[0]}.gz"


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_of_a_file_and_a_changed_bit_are_refused(encoder, indexes, tmp_path, kind):
    whole, path, generator = indexes[kind].path.read_bytes(), tmp_path / "x.index", random.Random(kind)
    sizes = [0, 1, 19, 20, len(whole) - 1, *(generator.randrange(len(whole)) for _ in range(20))]
    damaged = [part for size in sizes for part in (whole[:size], whole[len(whole) - size :])]
    for _ in range(40):
        changed = bytearray(whole)
        changed[generator.randrange(len(whole))] ^= 1 << generator.randrange(8)
        damaged.append(bytes(changed))
    for data in damaged:
        path.write_bytes(data)
        with pytest.raises(InputError, match=r"x\.index"):
            Index(path)
    for other in (tmp_path, tmp_path / "absent.index"):
        with pytest.raises(InputError, match=r"no such file|cannot read"):
            Index(other)
