"""Shares of a corpus: whole chapters, as many sentences as the share says; and trainings on them."""

import json

import pytest

from benchmarks.papers import limited_text, pages, store
from benchmarks.papers.limited_text import LimitedText, chosen
from benchmarks.papers.runs import Places


@pytest.mark.parametrize("share", [0.01, 0.1, 0.3])
@pytest.mark.parametrize("first", [0, 7])
def test_a_share_is_met_within_a_document(share, first):
    documents = [[f"{number} {line}" for line in range(1 + number * 37 % 50)] for number in range(2000)]
    taken = list(chosen(documents, share, first))
    sentences, wanted = sum(map(len, taken)), share * sum(map(len, documents))
    assert abs(sentences - wanted) <= 50
    assert all(document in documents for document in taken), "whole documents"
    assert int(taken[0][0].split()[0]) == first
    # They are spread over the whole: the last one is among the last few of all.
    assert int(taken[-1][0].split()[0]) > 2000 - 3 / share


def test_a_share_of_1_is_everything():
    documents = [["a", "b"], ["c"]]
    assert list(chosen(documents, 1.0, 0)) == documents


def test_trainings_differ_in_their_text_alone():
    of = {share: LimitedText(share, 1).settings() for share in (1, 100)}
    assert of[1]["train"].pop("corpus") == ["@work/limited-text/1-seed1.txt"]
    assert of[100]["train"].pop("corpus") == ["@data/corpus/train.txt.xz"]
    assert of[1]["train"] == of[100]["train"]
    assert LimitedText(1, 1, expanded=True).settings() != LimitedText(1, 1).settings()


@pytest.mark.slow
def test_a_training_on_a_share(tmp_path, monkeypatch):
    small = {"encoder": "bow", "word-dim": 8, "vocab-size": 50}
    monkeypatch.setattr(limited_text, "GLOVE", small)
    monkeypatch.setattr(limited_text, "STEPS", 6)
    monkeypatch.setattr(limited_text, "BATCH", 10)
    monkeypatch.setattr(limited_text, "TASKS", ("MR",))
    for name, text in (
        ("corpus/all.txt", "\n\n".join(f"the cat saw word{n}\n" * 10 for n in range(40))),
        ("eval/MR/all.tsv", "\n".join(f"{n % 2}\tthe {'cat' if n % 2 else 'dog'}" for n in range(40))),
    ):
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    places = Places(tmp_path / "data", tmp_path / "work")
    record = LimitedText(10, 0, corpus="@data/corpus/all.txt").perform(places)
    assert record["text"] == {"chapters": 4, "sentences": 40, "words": 3 + 4}
    assert record["settings"]["share"] == 10
    assert record["log"][-1]["step"] == 6, "more than one pass over the share"
    assert "MR" in record["tasks"]
    assert str(tmp_path) not in json.dumps({**record, "machine": None})


def test_the_table_has_a_row_for_each_share(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "STORED", tmp_path)
    assert pages.limited_text_table() == pages.NOT_STORED
    for seed in (0, 1):
        tasks = {task: {"accuracy": 0.5 + seed / 10} for task in pages.CLASSIFICATION}
        tasks |= {task: {"all": {"spearman": 0.4}} for task in pages.STS if task != "STSB"}
        tasks["STSB"] = {"test": {"spearman": 0.4}}
        text = {"sentences": 5000 + seed * 1000, "words": 900, "chapters": 3}
        store.add("limited-text", f"3-seed{seed}", {"tasks": tasks, "text": text})
    (row,) = pages.limited_text_table().splitlines()[2:]
    assert row.startswith("| 3 % | 5,500 | 55.0 ± 7.1 |")
    assert row.endswith("| 55.0 ± 7.1 | 40.0 ± 0.0 | 2 |")
