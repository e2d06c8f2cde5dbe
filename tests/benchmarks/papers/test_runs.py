"""The runs of the papers' tables can be made, are stored as they were asked for, and are not made twice."""

import json
from pathlib import Path

import pytest

from benchmarks.papers import store
from benchmarks.papers.plans import TABLES
from benchmarks.papers.runs import ALL_TASKS, Places, Run, figure, perform
from fastqt.sentences.runs.config import TrainConfig


@pytest.mark.parametrize("table", TABLES)
def test_names_of_a_table_are_distinct_and_its_options_exist(table):
    assert len({run.name for run in TABLES[table]}) == len(TABLES[table])
    for run in TABLES[table]:
        assert set(run.tasks) <= {*ALL_TASKS, "ALIGN"}
        if run.train is not None:
            TrainConfig(tuple(run.corpus), **{name.replace("-", "_"): x for name, x in run.train.items()})


@pytest.mark.parametrize("table", TABLES)
def test_stored_runs_have_the_settings_of_the_plan(table):
    planned = {run.name: run for run in TABLES[table]}
    for name, record in store.stored(table).items():
        assert record["settings"] == planned[name].settings()
        assert set(record["tasks"]) == set(planned[name].tasks)
        assert "/" + "work" not in json.dumps(record), "a path of a machine"


def test_what_a_table_shows_of_a_task():
    spearman = {"test": {"spearman": 0.5}, "all": {"spearman": 0.25}, "pearson": 0.75, "accuracy": 0.125}
    assert [figure(task, spearman) for task in ("STSB", "STS12", "SICK", "MR")] == [50, 25, 75, 12.5]


@pytest.fixture
def places(tmp_path):
    text = "\n".join(
        f"the {noun} saw word{n % 7} and word{n % 5}" for n in range(90) for noun in ("cat", "dog")
    )
    for name, lines in (
        ("corpus/train.txt", text),
        (
            "eval/MR/all.tsv",
            "\n".join(f"{n % 2}\tthe {'cat' if n % 2 else 'dog'} saw word{n}" for n in range(40)),
        ),
        ("eval/STSB/dev.tsv", "\n".join(f"g\t{n % 5}\tthe cat saw word{n}\tthe dog" for n in range(12))),
    ):
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(lines + "\n")
    (tmp_path / "data/eval/STSB/test.tsv").write_text((tmp_path / "data/eval/STSB/dev.tsv").read_text())
    return Places(tmp_path / "data", tmp_path / "work")


@pytest.mark.slow
def test_a_run_is_trained_evaluated_and_stored_once(places, tmp_path, monkeypatch):
    monkeypatch.setattr(store, "STORED", tmp_path / "stored")
    options = {"encoder": "bow", "word-dim": 8, "batch-size": 20, "steps": 4, "report-every": 1}
    run = Run("small", options, corpus=("@data/corpus/train.txt",), tasks=("MR", "STSB"))
    record = perform("tried", run, places)
    assert 0 < record["cpu_minutes"] < 5
    assert [line["step"] for line in record["log"]] == [1, 2, 3, 4]
    assert set(record["tasks"]) == {"MR", "STSB"}
    assert "folds" not in record["tasks"]["MR"]
    assert str(tmp_path) not in json.dumps({**record, "machine": None})
    store.add("tried", run.name, record)
    assert store.missing("tried", [run]) == []
    other = Run("small", {**options, "steps": 5}, corpus=run.corpus, tasks=run.tasks)
    assert store.missing("tried", [other]) == [other]
    again = perform("tried", other, places)
    assert again["cpu_minutes"] > record["cpu_minutes"], "the minutes of both parts of the training"
    assert again["log"][-1]["step"] == 5
    assert Path(tmp_path / "stored" / "tried.json").exists()
