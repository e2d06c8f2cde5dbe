"""What a training tells before its first step and soon after it."""

import json

import pytest

from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.train import loop, train
from fastqt.sentences.train.progress import Display

SMALL = {"word_dim": 6, "batch_size": 48, "context_size": 1, "device": "cpu"}


@pytest.fixture
def said(monkeypatch):
    """The lines that a training tells, by their first words."""
    lines = []
    monkeypatch.setattr(Display, "say", staticmethod(lambda text: lines.extend(text.splitlines())))
    return lines


def test_it_tells_what_it_has_read(planted, tmp_path, said):
    config = TrainConfig((planted[0],), valid=planted[1], **SMALL, epochs=2, vocab_size=20)
    train(config, tmp_path)
    told = dict(line.split(maxsplit=1) for line in said)
    with open(planted[0]) as file:
        words = [word for line in file for word in line.split()]
    assert told["corpus"].startswith(f"{planted[0]}: 480 sentences, {len(words):,} words, ")
    assert 0 < float(told["corpus"].split(", ")[-1].split("%")[0]) < 100
    assert told["vocabulary"] == "20 entries"
    assert told["model"] == "quickthoughts, encoder bow: 240 parameters"  # two tables of 20 x 6
    assert told["device"].startswith("cpu, ")
    assert told["training"] == "10 batches an epoch, of 48 sentences; up to step 20"
    assert said[-1] == f"held out    {planted[1]}: 2 batches"


def test_a_resumed_training_tells_where_it_goes_on(planted, tmp_path, said):
    config = TrainConfig((planted[0],), **SMALL, steps=3, keep_checkpoint=True)
    train(config, tmp_path)
    said.clear()
    train(TrainConfig((planted[0],), **SMALL), tmp_path, resume=True)
    assert "training    10 batches an epoch, of 48 sentences; up to step 10, from step 3" in said
    assert f"corpus      {planted[0]}: 480 sentences" in said  # the words are not counted again
    said.clear()
    train(TrainConfig((planted[0],), **SMALL), tmp_path, resume=True)
    assert said == []  # nothing is left to do


@pytest.mark.parametrize(("seconds", "steps"), [(0.0, [1, 10]), (1e9, [10])])
def test_the_first_report_does_not_wait_for_its_turn(planted, tmp_path, monkeypatch, seconds, steps):
    """It comes after some seconds of work. It is shown and not stored, because it depends on the machine."""
    shown = []

    class Recorder(Display):
        def report(self, line):
            shown.append(line["step"])

    monkeypatch.setattr(loop, "FIRST_REPORT", seconds)
    config = TrainConfig((planted[0],), **SMALL, report_every=1000)
    train(config, tmp_path, display=Recorder)
    assert shown == steps
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [
        10
    ]


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({}, [0, 5, 10]),
        ({"model": "simcse", "encoder": "bow"}, [0, 5, 10]),
        ({"model": "gloss-bow"}, [5, 10]),
    ],
    ids=str,
)
def test_the_first_line_is_of_fresh_weights(planted, tmp_path, settings, steps):
    """The validation before the first step changes nothing of what is learnt."""
    settings = SMALL | settings | {"epochs": 1, "report_every": 100, "valid_every": 5, "valid_batches": 1}
    for name, valid in (("with", planted[1]), ("without", None)):
        train(TrainConfig((planted[0],), valid=valid, **settings), tmp_path / name)
    lines = [json.loads(line) for line in (tmp_path / "with" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == steps
    assert all("validation_loss" in line for line in lines)
    if steps[0] == 0:
        models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("with", "without")]
        assert models[0] == models[1]
        assert "loss" not in lines[0]
