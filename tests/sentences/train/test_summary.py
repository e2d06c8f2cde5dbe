"""The end of a training: its figures beside those of chance and fresh weights, and commands that work."""

import gzip
import json
import shlex
from pathlib import Path

import pytest

from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.train.summary import closing_table, diagnoses, next_commands, speed


def write(directory, *lines):
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return closing_table(directory)


def cells(table):
    return [line.split() for line in table.splitlines()]


def held_out(step, loss, forward):
    return {"step": step, "validation_loss": loss, "validation_forward_accuracy": forward} | {
        "validation_chance": 0.005
    }


def test_held_out_figures_stand_beside_fresh_weights_and_chance(tmp_path):
    table = write(
        tmp_path,
        held_out(0, 6, 0.004),
        {"step": 5, "loss": 4, "forward_accuracy": 0.9, "chance": 0.01},
        held_out(1000, 5, 0.125) | {"loss": 3.0, "seconds": 5.0},
    )
    assert cells(table) == [
        ["held", "out", "fresh", "weights", "step", "1,000", "chance"],
        ["loss", "6.000", "5.000", "–"],
        ["forward", "accuracy", "0.40%", "12.50%", "0.50%"],
    ]
    assert len({len(line) for line in table.splitlines()}) == 1


def test_the_model_that_development_pairs_have_chosen_is_named(tmp_path):
    figures = [(0, 0.3), (125, 0.7), (250, 0.6)]
    table = write(tmp_path, *({"step": step, "dev_spearman": value} for step, value in figures))
    assert cells(table) == [
        ["held", "out", "fresh", "weights", "step", "125,", "kept", "step", "250", "chance"],
        ["dev", "spearman", "0.300", "0.700", "0.600", "0.000"],
    ]


def test_a_model_from_before_training_that_was_best_is_named_and_told_of(tmp_path):
    figures = [(0, 0.7), (125, 0.5), (250, 0.6)]
    table = write(tmp_path, *({"step": step, "loss": 1, "dev_spearman": value} for step, value in figures))
    assert cells(table)[0] == ["held", "out", "fresh", "weights,", "kept", "step", "250", "chance"]
    (said,) = diagnoses(tmp_path)
    assert "worse on --dev: Spearman's coefficient was 0.700 before the first step, and 0.600 at best" in said


def test_the_model_that_the_loss_has_chosen_is_named(tmp_path):
    """Where the loss tells when to stop; that of fresh weights does not count."""
    write(tmp_path, *(held_out(step, loss, 0.1) for step, loss in ((0, 2), (10, 4), (20, 3), (30, 5))))
    titles = cells(closing_table(tmp_path, "validation_loss"))[0]
    assert titles == ["held", "out", "fresh", "weights", "step", "20,", "kept", "step", "30", "chance"]
    assert "kept" not in closing_table(tmp_path, None)


def test_without_held_out_text_the_last_batch_is_shown(tmp_path):
    table = write(tmp_path, {"step": 7, "loss": 2.5, "forward_accuracy": 0.25, "chance": 0.01, "seconds": 1})
    assert cells(table) == [
        ["last", "batch", "of", "the", "corpus", "step", "7", "chance"],
        ["loss", "2.500", "–"],
        ["forward", "accuracy", "25.00%", "1.00%"],
    ]
    assert write(
        tmp_path, {"step": 7, "loss": 2.5}
    ) == "last batch of the corpus  step 7\nloss" + " " * 23 + ("2.500")
    assert write(tmp_path) == ""


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"corpus": ("a.txt.gz",), "valid": "b c.txt"}, "'b c.txt'"),
        ({"corpus": ("a.txt.gz",)}, "a.txt.gz"),
        ({"corpus": ("rows.tsv.gz",), "model": "simcse"}, None),
        ({"corpus": ("rows.parquet",)}, None),
        ({"corpus": ("-",)}, "run/corpus.txt"),
    ],
)
def test_the_next_commands_name_a_text_of_the_run(settings, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in map(Path, shlex.split(text or "")):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(gzip.compress(b"Is it?\n") if path.suffix == ".gz" else b"Is it?\n")

    neighbors, embed, evaluate = next_commands(TrainConfig(**settings), "run")
    sentence = "'a sentence'" if text is None else "'Is it?'"
    assert neighbors == f"fastqt neighbors run {text or 'CORPUS'} --query {sentence}"
    assert embed == f"fastqt embed run {text or 'SENTENCES'} --out run/vectors.npy"
    assert evaluate == "fastqt evaluate run --baseline --data DIR"


def reported(step, **figures):
    """A line of a report, of which half of the time went into the data."""
    times = {"data_seconds": 2.0, "gradients_seconds": 1.5, "optimiser_seconds": 0.5}
    rates = {"sentences_per_second": 100.0, "tokens_per_second": 1500.0}
    return {"step": step, "loss": 3.0, "forward_accuracy": 0.5, "backward_accuracy": 0.5, "chance": 0.01} | (
        times | rates | figures
    )


def test_the_speed_of_a_run_is_told_with_the_parts_of_its_time(tmp_path):
    write(tmp_path, held_out(0, 6, 0.004), reported(1), reported(2, tokens_per_second=2500.0))
    assert speed(tmp_path) == "100 sentences/s, 2,000 tokens/s; time: data 50%, gradients 38%, optimiser 12%"
    write(tmp_path, reported(1, data_seconds=2.5))
    assert "Reading takes most of the time" in speed(tmp_path)
    write(tmp_path, held_out(0, 6, 0.004))
    assert speed(tmp_path) == ""


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        ({"forward_accuracy": 0.012, "backward_accuracy": 0.011}, "The accuracies are near chance"),
        ({"validation_forward_accuracy": 0.01, "validation_chance": 0.01}, "The accuracies are near chance"),
        ({"validation_accuracy": 0.01, "validation_chance": 0.01}, "The accuracies are near chance"),
        ({"uniformity": -0.02}, "The vectors have collapsed: uniformity is -0.020"),
        ({"loss": 4.0}, "The loss has risen from 3.000 at step 1 to 4.000"),
        ({"loss_scale": 0.25}, "Gradients overflow float16 even where the loss is multiplied by 0.25"),
    ],
    ids=str,
)
def test_what_went_wrong_is_told_in_words(tmp_path, figures, words):
    write(tmp_path, reported(1), reported(2, **figures))
    (said,) = diagnoses(tmp_path)
    assert said.startswith(words)
    assert "Try " in said


def test_nothing_is_told_of_a_run_that_went_well(tmp_path):
    fine = {"uniformity": -2.0, "loss": 2.0, "loss_scale": 65536.0}
    write(tmp_path, held_out(0, 6, 0.004), reported(1), reported(2, **fine))
    assert diagnoses(tmp_path) == []
