"""train --config: options of a JSON file, such as a run's own, below those of the command line."""

import json
import shutil

import pytest

from fastqt.sentences.cli import main
from fastqt.sentences.runs.config import TrainConfig
from tests.shared.command_lines import SMALL, error_line
from tests.shared.trainings import assert_same_weights


@pytest.fixture
def run(planted, tmp_path):
    run = tmp_path / "run"
    options = ["--model", "simcse", "--betas", "0.8,0.9", "--steps", "3", "--learning-rate", "0.002"]
    assert main(["train", planted[0], "--out", str(run), *SMALL, *options]) == 0
    return run


def test_a_runs_own_settings_train_it_again(run, tmp_path):
    """The corpus is among them."""
    assert main(["train", "--config", str(run / "config.json"), "--out", str(tmp_path / "again")]) == 0
    assert_same_weights(run, tmp_path / "again")
    assert (run / "config.json").read_bytes() == (tmp_path / "again" / "config.json").read_bytes()


def test_the_command_line_stands_above_the_file(run, planted, tmp_path):
    shutil.copy(planted[0], tmp_path / "text.txt")
    words = ["train", str(tmp_path / "text.txt"), "--config", str(run / "config.json"), "--steps", "1"]
    assert main([*words, "--out", str(tmp_path / "other")]) == 0
    settings = TrainConfig.load(tmp_path / "other" / "config.json")
    assert (settings.steps, settings.betas, settings.model) == (1, (0.8, 0.9), "simcse")
    assert settings.corpus == (str(tmp_path / "text.txt"),)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"learning_rat": 1}, "unknown option 'learning_rat'; did you mean learning_rate?"),
        ({"batchsize": 20}, "unknown option 'batchsize'; did you mean batch_size?"),
        ({"xyzzy": 20}, "unknown option 'xyzzy'"),
        ({"learning-rate": "high"}, "learning_rate: want a number, got 'high'"),
        (
            {"model": "simcse", "radius": 3.0},
            "radius: want it with model gloss-bow or gloss-pos alone, got 3.0",
        ),
        ([1], "is damaged: want an object, got a list"),
    ],
    ids=str,
)
def test_what_is_no_option_is_refused_in_one_line(values, words, planted, tmp_path, capsys):
    path = tmp_path / "options.json"
    path.write_text(json.dumps(values))
    message = error_line(capsys, "train", planted[0], "--config", str(path), "--out", str(tmp_path / "run"))
    assert message.endswith(words)
    assert not (tmp_path / "run").exists()


def test_a_file_that_is_not_there_is_named(tmp_path, capsys):
    message = error_line(
        capsys, "train", "--config", str(tmp_path / "no.json"), "--out", str(tmp_path / "run")
    )
    assert message == f"config: no such file: {tmp_path}/no.json"
