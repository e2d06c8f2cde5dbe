"""Searches of an index beside the exact search and numpy; making one: refusals, failures, memory."""

import gzip
import os
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from fastqt.errors import InputError
from fastqt.sentences.inference.index import Index, IndexOptions, build, build_index, recall
from fastqt.sentences.inference.search import nearest
from fastqt.sentences.text import reader
from tests.shared.clustered import Clustered, write_corpus

ROOT = Path(__file__).parents[4]
KINDS = ["flat", "ivf"]
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


@pytest.mark.parametrize("kind", KINDS)
def test_faiss_reads_the_file(encoder, indexes, kind):
    faiss = pytest.importorskip("faiss", reason="the extra faiss is not installed")
    read = faiss.read_index(str(indexes[kind].path))
    unit = encoder.matrix / np.linalg.norm(encoder.matrix, axis=1, keepdims=True)
    if kind == "ivf":
        read.nprobe = indexes[kind].effort
    scores, rows = read.search(unit[:50], 5)
    wanted, wanted_rows = indexes[kind].search_vectors(unit[:50], 5)
    np.testing.assert_allclose(scores, wanted, atol=1e-6)
    assert (rows == wanted_rows).mean() > 0.99  # equal cosines may change places
    assert read.ntotal == ROWS


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


def test_recall_is_what_it_says_and_what_was_wanted(encoder, indexes):
    """Of all rows as queries, counted by their numbers: it shares no code with how an index measures it."""
    index = indexes["ivf"]
    exact = cosines(encoder, np.arange(ROWS))
    np.fill_diagonal(exact, -np.inf)
    wanted = np.argsort(-exact, axis=1)[:, :10]
    _, rows = index.search_vectors(encoder.matrix / np.linalg.norm(encoder.matrix, axis=1, keepdims=True), 11)
    recall = np.mean([len(set(row) & set(other)) / 10 for row, other in zip(rows, wanted, strict=True)])
    assert index.recall.queries == 1000
    assert index.recall.at == 10
    assert index.recall.value >= 0.95
    assert abs(recall - index.recall.value) < 0.02
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


def test_the_corpus_may_move_but_not_change(encoder, corpus, indexes, tmp_path):
    index = indexes["flat"]
    first = write_corpus(tmp_path / "x.txt", range(1000))
    second = write_corpus(tmp_path / "y.txt", range(1000, ROWS))
    changed = write_corpus(tmp_path / "z.txt", [*range(1000, ROWS - 1), 3])
    index.check_corpus(first + second)
    for other in (first, second + first, first + changed):
        with pytest.raises(InputError, match=r"was made from another corpus than .*x\.txt|z\.txt"):
            index.check_corpus(other)


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
    with pytest.raises(InputError, match="effort: want at least 1, got 0"):
        index.search_vectors(encoder.matrix[:1], 1, 0)


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
    diverged = Clustered(40)
    diverged.matrix[33] = np.nan
    for model, texts, options, message in (
        (encoder, [str(tmp_path / "blank.txt")], {}, r"nothing to index: no sentence in .*blank\.txt"),
        (encoder, [str(tmp_path / "latin.txt")], {}, "line 2 is not UTF-8"),
        (encoder, corpus, {"kind": "ivf", "lists": 41}, "lists: want at most 40, the number of sentences"),
        (diverged, corpus, {}, r"corpus\.txt: line 41: the model's vector is not finite"),
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


def test_the_least_effort_is_chosen(tmp_path, monkeypatch):
    """One list less would miss too many."""
    encoder, corpus = Clustered(2000), write_corpus(tmp_path / "corpus.txt", range(2000))
    asked = []
    monkeypatch.setattr(build, "sample", lambda *_: asked.append(recall.sample(*_)) or asked[0])
    for min_recall in (0.5, 0.9, 0.99, 1):
        asked.clear()
        options = IndexOptions(kind="ivf", lists=200, min_recall=min_recall)
        index = build_index(encoder, corpus, tmp_path / "x.index", options)
        assert index.recall == recall.measure(index, asked[0], index.effort)
        assert index.recall.value >= min_recall
        if index.effort > 1:
            assert recall.measure(index, asked[0], index.effort - 1).value < min_recall


def test_the_kind_follows_from_the_size(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "FLAT_ROWS", 100)
    encoder = Clustered(100)
    for rows, kind in ((99, "flat"), (100, "ivf")):
        corpus = write_corpus(tmp_path / "corpus.txt", range(rows))
        assert build_index(encoder, corpus, tmp_path / "x.index").kind == kind


def test_small_parts_and_compressed_files_make_the_same_index(tmp_path, monkeypatch):
    encoder = Clustered(900)
    out, corpus = tmp_path / "x.index", write_corpus(tmp_path / "corpus.txt", range(900))
    for kind in ("flat", "ivf"):
        build_index(encoder, corpus, out, IndexOptions(kind=kind))
        whole = out.read_bytes()
        with monkeypatch.context() as small:
            for name, value in (("SENTENCES", 7), ("ROWS", 13), ("ELEMENTS", 11)):
                small.setattr(build, name, value)
            small.setattr(reader, "READ_BYTES", 100)
            build_index(encoder, corpus, out, IndexOptions(kind=kind))
        assert out.read_bytes() == whole
    (tmp_path / "corpus.txt.gz").write_bytes(gzip.compress(Path(corpus[0]).read_bytes()))
    index = build_index(encoder, [f"{corpus[0]}.gz"], out)
    index.check_corpus(corpus)
    assert index.search(encoder, ["11"], 1)[0][0].file == f"{corpus[0]}.gz"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["flat", "ivf"])
def test_memory_does_not_grow_with_the_corpus(tmp_path, monkeypatch, kind):
    """Vectors of 24,000 rows take 24 MB here, and those of 3,000 take 3."""
    for name, value in (("ROWS", 256), ("SENTENCES", 256), ("TRAINED_ROWS", 4)):
        monkeypatch.setattr(build, name, value)
    monkeypatch.setattr(recall, "QUERIES", 50)
    monkeypatch.setattr(recall, "ROWS", 256)
    monkeypatch.setattr(reader, "READ_BYTES", 1 << 12)
    peaks, encoder = [], Clustered(500, width=256)
    for rows in (3_000, 24_000):
        corpus = write_corpus(tmp_path / "corpus.txt", (n % 500 for n in range(rows)))
        tracemalloc.start()
        options = IndexOptions(kind=kind, lists=20 if kind == "ivf" else None)
        build_index(encoder, corpus, tmp_path / "x.index", options)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert (tmp_path / "x.index").stat().st_size > 24e6
    assert peaks[1] < peaks[0] + 4e6


KILLED = """
import os, signal
from tests.shared.clustered import Clustered
from fastqt.sentences.inference.index import IndexOptions, build, build_index
def killed(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)
build.sample = killed
build_index(Clustered(300), [{corpus!r}], {out!r}, IndexOptions(kind="ivf"))
"""


@pytest.mark.slow
def test_a_killed_process_leaves_the_old_index(tmp_path):
    """It is killed when all but the recall is written."""
    (corpus,) = write_corpus(tmp_path / "corpus.txt", range(300))
    out = tmp_path / "x.index"
    build_index(Clustered(300), [corpus], out)
    before = out.read_bytes()
    program = KILLED.format(corpus=corpus, out=str(out))
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True)
    assert done.returncode == -signal.SIGKILL
    assert out.read_bytes() == before
    Index(out)
    (partial,) = [path for path in tmp_path.iterdir() if path.suffix == ".partial"]
    assert partial.stat().st_size > 0
