"""The queries for neighbours are drawn, and each sentence is in the pool once."""

import numpy as np
import pytest

from benchmarks.papers import neighbours, pages, store
from benchmarks.papers.neighbours import LENGTHS, SYSTEMS, Neighbours, distinct, drawn
from benchmarks.papers.runs import Places
from fastqt.sentences.evaluation.encoders import NamedEncoder


@pytest.fixture
def places(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "STORED", tmp_path / "stored")
    monkeypatch.setattr(neighbours, "POOL", "@data/pool.txt")
    lines = [f"Sentence number {n}, of which there are not more than forty." for n in range(40)]
    (tmp_path / "pool.txt").write_text(
        "\n".join([*lines, "“sentence number 3 of which there are", "Yes."]) + "\n"
    )
    angles = {line: n / 20 for n, line in enumerate(lines)}

    def encode(texts):
        return np.array([[np.cos(angles.get(x, 3)), np.sin(angles.get(x, 3))] for x in texts])

    monkeypatch.setattr(neighbours, "load", lambda name, places: NamedEncoder(encode, "key"))
    return Places(tmp_path, tmp_path / "work")


def test_a_sentence_with_other_marks_is_not_in_the_pool_again(tmp_path):
    (tmp_path / "a.txt").write_text("Yes, sir.\n'Yes, Sir!\nNo, sir.\n\nyes sir\n")
    assert distinct(str(tmp_path / "a.txt")) == ["Yes, sir.", "No, sir."]


def test_queries_are_drawn_among_sentences_of_some_length(places):
    pool = distinct(str(places.data / "pool.txt"))
    rows = drawn(pool, 5, seed=0)
    assert len(set(rows)) == 5
    assert all(LENGTHS[0] <= len(pool[row].split()) <= LENGTHS[1] for row in rows)
    assert rows == drawn(pool, 5, seed=0)
    assert rows != drawn(pool, 5, seed=1)


def test_neighbours_are_the_nearest_other_sentences(places):
    record = Neighbours("mean of GloVe").perform(places)
    assert len(record["neighbours"]) == 5
    for query, near in record["neighbours"].items():
        number = int(query.split()[2].rstrip(","))
        found = [int(each["sentence"].split()[2].rstrip(",")) for each in near]
        assert len(found) == 3
        assert query not in {each["sentence"] for each in near}
        assert {abs(n - number) for n in found[:2]} <= ({1} if 0 < number < 39 else {1, 2})
        cosines = [each["cosine"] for each in near]
        assert cosines == sorted(cosines, reverse=True)


def test_both_kinds_are_shown_beside_each_other(places):
    assert pages.neighbours_text() == pages.NOT_STORED
    for system in SYSTEMS:
        store.add("neighbours", system, Neighbours(system).perform(places))
    lines = pages.neighbours_text().splitlines()
    assert lines[0] == lines[-1] == "```"
    assert sum(line.strip() in SYSTEMS for line in lines) == 2 * 5
    assert sum(line.startswith("    1.") or line.startswith("    0.") for line in lines) == 2 * 5 * 3
