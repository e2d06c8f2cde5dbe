"""The end of a training: its figures beside those of chance and fresh weights, and commands that work."""

import gzip
import json
import shlex
from pathlib import Path

import pytest

from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.train.summary import closing_table, next_commands


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
