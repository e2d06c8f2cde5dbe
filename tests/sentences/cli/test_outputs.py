"""What a command writes never takes the place of what it reads, nor of what a run did not write itself."""

import io
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from fastqt.sentences.cli import main
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.train import train
from tests.shared.command_lines import error_line

TEXT = "a b\n\nc d\n" * 8
TRAIN = "--word-dim 4 --batch-size 8 --context-size 1 --steps 1 --device cpu"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A directory with a run, and with files that commands read."""
    folder = tmp_path_factory.mktemp("files")
    for name in ("text.txt", "text.npy", "text.index"):
        (folder / name).write_text(TEXT)
    settings = {"word_dim": 4, "batch_size": 8, "context_size": 1, "steps": 1, "device": "cpu"}
    train(TrainConfig((str(folder / "text.txt"),), **settings), folder / "model")
    (folder / "pairs.tsv").write_text("a\tb\nc\td\n")
    (folder / "link.tsv").symlink_to("pairs.tsv")
    np.save(folder / "features.npy", np.eye(4, dtype=np.float32))
    (folder / "tokens.json").write_text("{}")
    (folder / "vectors.json").write_text('{"a": [1, 2], "b": [3, 4]}')
    (folder / "data" / "MR").mkdir(parents=True)
    (folder / "data" / "MR" / "all.tsv").write_text("0\ta\n1\tb\n" * 20)
    for name in ("corpus.txt", "model.safetensors", "metrics.jsonl", "huggingface"):
        other = folder / f"with {name}"
        other.mkdir()
        if name == "huggingface":
            other = other / name
            other.mkdir()
        (other / name).write_text("mine")
    return folder


def contents(folder):
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def with_input(monkeypatch, text):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))


READ = "is read, and would be lost"
NOT_TWICE = "want standard input, -, once, got it 2 times"
NOT_STDIN = "want files that can be read more than once, got standard input; write the text to"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("embed model text.npy --out text.npy", READ),
        ("index model text.txt text.index --out text.index", READ),
        ("mine model pairs.tsv --out pairs.tsv", READ),
        ("mine model pairs.tsv --out link.tsv", READ),
        ("mine model text.txt --corpus pairs.tsv --out link.tsv", READ),
        ("evaluate model --data data --json model/config.json", READ),
        ("evaluate random:model --data data --json model/finished.json", READ),
        ("evaluate sif:pairs.tsv,tokens.json --data data --json tokens.json", READ),
        ("evaluate word-vectors:vectors.json --data data --json ./vectors.json", READ),
        ("retrieve model --features features.npy --captions text.txt --json model/config.json", READ),
        (f"train text.txt --out new --vocabulary tokens.json --profile tokens.json {TRAIN}", READ),
        ("train --out model --resume --profile model/config.json", READ),
        ("train - --out with~corpus.txt", "with corpus.txt/corpus.txt is there, with another text than that"),
        ("train - --out with~corpus.txt --resume", "corpus.txt is there, with another text than that of"),
        ("train text.txt --out with~model.safetensors", "already holds a run"),
        ("train text.txt --out with~model.safetensors --resume", "no run to resume, but a file of a run's"),
        ("train text.txt --out with~metrics.jsonl --resume", "no run to resume, but a file of a run's name"),
        ("train text.txt --out with~huggingface", "already holds a run"),
        ("train - text.txt - --out new", f"corpus: {NOT_TWICE}"),
        ("neighbors model - - --query a", f"corpus: {NOT_TWICE}"),
        ("index model - - --out new.index", f"corpus: {NOT_TWICE}"),
        ("analogy model - - --a a --b b --c c", f"corpus: {NOT_TWICE}"),
        ("mine model - --corpus - --out new.tsv", f"pairs and corpus: {NOT_TWICE}"),
        (
            "retrieve model --features features.npy --captions - --dev - --test -",
            "captions, dev and test: want standard input, -, once, got it 3 times",
        ),
        ("retrieve model --features - --captions text.txt", f"features: {NOT_STDIN}"),
        (f"train text.txt --out new --valid - {TRAIN}", f"valid: {NOT_STDIN}"),
        (f"train text.txt --out new --dev - {TRAIN}", f"dev: {NOT_STDIN}"),
        (f"train text.txt --out new --valid absent {TRAIN}", "no such file: absent"),
        (f"train - --out new --dev absent {TRAIN}", "no such file: absent"),
    ],
)
def test_what_would_be_lost_is_refused_before_the_work(files, capsys, monkeypatch, line, message):
    monkeypatch.chdir(files)
    with_input(monkeypatch, TEXT)
    before, folders = contents(files), sorted(os.listdir())
    assert message in error_line(capsys, *(word.replace("~", " ") for word in line.split(" ")))
    assert contents(files) == before
    assert sorted(os.listdir()) == folders


def test_standard_input_that_was_copied_before_is_taken_as_it_is(tmp_path, capsys, monkeypatch):
    """A training that was refused keeps the copy, since nobody may be able to read that text again."""
    out, small = str(tmp_path / "run"), [*TRAIN.split(" ")]
    with_input(monkeypatch, TEXT)
    assert "shorter than a batch" in error_line(capsys, "train", "-", "--out", out, "--batch-size", "99")
    assert (tmp_path / "run" / "corpus.txt").read_text() == TEXT
    with_input(monkeypatch, TEXT + "more")
    assert "with another text" in error_line(capsys, "train", "-", "--out", out, *small)
    with_input(monkeypatch, TEXT)
    assert main(["train", "-", "--out", out, *small, "--keep-checkpoint"]) == 0
    with_input(monkeypatch, "not read, because the run has its copy")
    assert main(["train", "--out", out, "--resume", "--steps", "2"]) == 0
    assert (tmp_path / "run" / "corpus.txt").read_text() == TEXT
