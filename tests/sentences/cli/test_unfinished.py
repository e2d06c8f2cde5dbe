"""A model whose training has not ended is not taken for a trained one, by any command that loads it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fastqt.sentences.cli import main
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.train import train
from tests.shared.trainings import stopping


def corpus(path):
    path.write_text("".join(f"one w{i % 7} two w{i % 5}\n" for i in range(64)))
    return str(path)


SMALL = {"model": "simcse", "word_dim": 8, "batch_size": 16, "report_every": 1}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A training that was stopped after 3 steps, and others that have ended, two with a checkpoint."""
    folder = tmp_path_factory.mktemp("runs")
    config = TrainConfig((corpus(folder / "text.txt"),), epochs=2, **SMALL)
    train(config, folder / "stopped", display=stopping(3))
    train(config, folder / "ended")
    train(replace(config, keep_checkpoint=True), folder / "kept")
    train(replace(config, keep_checkpoint=True, steps=3), folder / "steps")
    return folder


def commands(run, folder):
    text = str(folder / "text.txt")
    return {
        "embed": ["embed", run, "--out", str(folder / "x.npy"), text],
        "neighbors": ["neighbors", run, text, "--query", "two w1", "-k", "1"],
        "index": ["index", run, text, "--out", str(folder / f"{Path(run).name}.index")],
        "export": ["export", run, "--format", "sentence-transformers", "--overwrite"],
    }


@pytest.mark.parametrize("name", ["embed", "neighbors", "index", "export"])
def test_a_command_says_where_the_training_stands(name, runs, capsys):
    for run in ("stopped", "ended", "kept", "steps"):
        words = commands(str(runs / run), runs)[name]
        words += ["--out", str(runs / f"export-{run}")] * (name == "export")
        assert main(words) == 0
        said = capsys.readouterr().err
        told = f"{runs / run}: this training has not ended: it stands at step 3, in epoch 1 of 2" in said
        assert told == ("has not ended" in said) == (run == "stopped"), said
        if name == "export":
            card = (runs / f"export-{run}" / "README.md").read_text()
            told = "The training has not ended: it stands at step 3, in epoch 1 of 2." in card
            assert told == ("has not ended" in card) == (run == "stopped")


def test_a_damaged_checkpoint_does_not_keep_the_model_from_use(runs, tmp_path, capsys):
    run = tmp_path / "run"
    run.mkdir()
    for path in (runs / "stopped").iterdir():
        (run / path.name).write_bytes(path.read_bytes())
    (run / "checkpoint.safetensors").write_bytes(b"damaged")
    assert main(commands(str(run), runs)["embed"]) == 0
    assert "ended" not in capsys.readouterr().err
