"""Retrieval sets in BEIR's format: what is read, searched, measured and refused."""

import gzip
import json
import lzma

import numpy as np
import pytest

from fastqt.errors import InputError
from fastqt.sentences.evaluation import evaluate, judged, ranking_metrics
from fastqt.sentences.evaluation.judged import read_judged
from fastqt.sentences.evaluation.vectors import embed

DOCUMENTS = {
    "d1": ("Cats", "a cat sat on a mat"),
    "d2": ("", "a dog ran far away"),
    "d3": ("Mats", "a mat"),
    "d4": ("", "  "),
    "q2": ("", "a dog"),
}
QUERIES = {"q1": "cat mat", "q2": "dog", "q3": "never asked"}
CORPUS, QUERY, QREL = "corpus.jsonl", "queries.jsonl", "qrels/test.tsv"
QRELS = [("q1", "d1", 2), ("q1", "d3", 1), ("q1", "gone", 1), ("q2", "d2", 1), ("q2", "d1", 0)]


def write_set(folder, documents=DOCUMENTS, queries=QUERIES, qrels=QRELS):
    """A set as files in BEIR's format."""
    (folder / "qrels").mkdir(parents=True)
    lines = [{"_id": name, "title": title, "text": text} for name, (title, text) in documents.items()]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    lines = [{"_id": name, "text": text, "metadata": {}} for name, text in queries.items()]
    (folder / "queries.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = [("query-id", "corpus-id", "score"), *qrels]
    (folder / "qrels" / "test.tsv").write_text("".join("\t".join(map(str, row)) + "\n" for row in rows))
    return folder


@pytest.fixture
def folder(tmp_path):
    return write_set(tmp_path / "data" / "pets")


def words(texts):
    """Word counts."""
    known = ("cat", "mat", "dog", "ran", "a", "Cats", "Mats")
    return np.array([[text.split().count(word) for word in known] for text in texts], float)


def test_a_set_is_read_with_titles_and_without_what_has_no_text(folder):
    found = read_judged(folder)
    assert found.queries == {"q1": "cat mat", "q2": "dog"}
    texts = {"q2": "a dog", "d3": "Mats a mat", "d2": "a dog ran far away", "d1": "Cats a cat sat on a mat"}
    assert found.documents == texts
    assert found.qrels == {"q1": {"d1": 2, "d3": 1, "gone": 1}, "q2": {"d2": 1, "d1": 0}}


def test_the_query_itself_is_not_found(folder):
    """As in BEIR: where queries are documents too, the best answer would always be the query."""
    found = read_judged(folder)
    cosines, rows, *_ = found.search(embed(words, found.texts(), progress=False))
    names = [list(found.documents)[row] for row in rows[1]]
    assert names[-1] == "q2"
    assert cosines[1, -1] == -np.inf
    assert names[0] == "d2"


def test_the_figures_of_a_small_set_by_hand(folder):
    results = evaluate(words, folder.parent, progress=False)
    figures = results.tasks["pets"]
    # q1 finds d1 and then d3; the third relevant document is gone. q2 finds d2.
    log3 = np.log2(3)
    assert figures["nDCG@10"] == pytest.approx((((2 + 1 / log3) / (2 + 1 / log3 + 1 / 2)) + 1) / 2)
    assert figures["MRR@10"] == 1
    assert figures["MAP@1000"] == pytest.approx((2 / 3 + 1) / 2)
    assert figures["recall@1"] == pytest.approx((1 / 3 + 1) / 2)
    assert figures["recall@10"] == figures["recall@100"] == pytest.approx((2 / 3 + 1) / 2)
    assert figures["sizes"] == {"queries": 2, "documents": 4, "judgements": 5}
    shown = [line.split()[:2] for line in results.table().splitlines()]
    assert shown == [["pets", name] for name in figures if name != "sizes"]


def test_a_search_in_blocks_finds_what_a_sort_of_all_cosines_finds(tmp_path, monkeypatch):
    """With more documents than are ranked, equal texts, and a search that reads 64 of them at a time."""
    generator = np.random.default_rng(0)
    letters = np.array(list("abcdefgh"))
    texts = [" ".join(generator.choice(letters, 6)) for _ in range(1500)]
    documents = {f"d{number}": ("", text) for number, text in enumerate(texts)}
    queries = {f"q{number}": " ".join(generator.choice(letters, 3)) for number in range(20)}
    qrels = [
        (query, f"d{generator.integers(300 * n, 300 * n + 300)}", n) for query in queries for n in range(4)
    ]
    folder = write_set(tmp_path / "letters", documents, queries, qrels)

    def encode(texts):
        counts = np.array([[text.count(letter) for letter in letters] for text in texts], np.float32)
        return counts @ np.random.default_rng(1).standard_normal((8, 5)).astype(np.float32)

    monkeypatch.setattr(judged, "DOCUMENTS", 64)
    found = evaluate(encode, folder, progress=False).tasks["letters"]

    x, y = (encode(list(part)).astype(float) for part in (queries.values(), texts))
    cosines = (x @ y.T) / np.linalg.norm(x, axis=1)[:, None] / np.linalg.norm(y, axis=1)
    run = {
        query: dict(zip(documents, row, strict=True))
        for query, row in zip(queries, cosines.round(6).tolist(), strict=True)
    }
    judgements = {query: {name: grade for q, name, grade in qrels if q == query} for query in queries}
    each = ranking_metrics(judgements, run)
    for name, value in found.items():
        if name != "sizes":
            wanted = np.mean([figures[name] for figures in each.values()])
            assert value == pytest.approx(wanted, abs=1e-9), name


def test_compressed_files_and_a_set_beside_other_tasks(folder, tmp_path):
    plain = evaluate(words, folder.parent, ["pets"], progress=False)
    for name, opener, ending in (("corpus", gzip, ".gz"), ("queries", lzma, ".xz")):
        path = folder / f"{name}.jsonl"
        with opener.open(f"{path}{ending}", "wb") as file:
            file.write(path.read_bytes())
        path.unlink()
    (folder.parent / "MR").mkdir()
    (folder.parent / "MR" / "all.tsv").write_text("".join(f"{n % 2}\ta cat {n % 2}\n" for n in range(40)))
    both = evaluate(words, folder.parent, grid=(1.0,), progress=False)
    assert list(both.tasks) == ["MR", "pets"]
    assert both.tasks["pets"] == plain.tasks["pets"]
    assert evaluate(words, folder, progress=False).tasks == plain.tasks


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (CORPUS, '{"_id": "d1", "text": "a"}\nno\n', r"corpus\.jsonl: line 2 is damaged: Expecting"),
        (CORPUS, '["d1"]\n', r"line 1 is damaged: want an object, got a list"),
        (CORPUS, '{"_id": 1, "text": "a"}\n', r"line 1 is damaged: _id: want a text, got 1"),
        (CORPUS, '{"_id": "d1", "title": "a"}\n', r"line 1 is damaged: text is missing"),
        (CORPUS, '{"_id": "d1", "title": 2, "text": "a"}\n', "title: want a text, got 2"),
        (CORPUS, 2 * '{"_id": "d1", "text": "a"}\n', "line 2: want each _id once, got 'd1' again"),
        (CORPUS, '{"_id": "d1", "text": " "}\n', r"corpus\.jsonl: want documents with text, got none"),
        (CORPUS, '{"_id": "d1", "text": "\\ud800"}\n', "line 1: want text that UTF-8 can hold"),
        (CORPUS, "", r"corpus\.jsonl is empty"),
        (QUERY, '{"_id": "q2", "text": "a"}\n', r"test\.tsv: want queries of .*jsonl, got 'q1'"),
        (QUERY, '{"_id": "q1", "text": ""}\n', "want text in each query .*, got none in 'q1'"),
        (QREL, "q1\td1\n", r"test\.tsv: line 1: want a query, a document .*, got 2 columns"),
        (QREL, "q\td\ts\n", r"test\.tsv: want judgements below the header, got none"),
        (QREL, "q\td\ts\nq1\td1\t0.5\n", "line 2: want a whole number as the .*, got '0.5'"),
        (QREL, "q1\td1\t1\nq1\td1\t0\n", "line 2: want each document once .*, got 'd1' again"),
        (QREL, None, r"no such file: .*pets/qrels/test\.tsv"),
        (QUERY, None, r"no such file: .*pets/queries\.jsonl"),
        (CORPUS, None, r"data: .*, and no retrieval set, which is a folder with a corpus"),
    ],
)
def test_files_that_are_no_set_are_refused(folder, name, text, message):
    if text is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(text)
    with pytest.raises(InputError, match=message):
        evaluate(words, folder.parent, progress=False)
