"""The model card of a run: what is in it, and when it is written."""

import json
import re
from dataclasses import replace

import pytest

from fastqt.sentences.runs.card import card_text, progress_of
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.runs.digests import digest
from fastqt.sentences.runs.model import build_model
from fastqt.sentences.text import Vocabulary
from fastqt.sentences.train import train
from fastqt.sentences.train.summary import closing_table

SMALL = {"word_dim": 6, "batch_size": 50, "context_size": 2, "steps": 3, "keep_checkpoint": True}


@pytest.fixture
def config(planted):
    return TrainConfig((planted[0],), **SMALL)


def rows(card, section):
    """The cells of the table of a section."""
    lines = card.split(f"## {section}\n")[1].split("\n## ")[0].splitlines()
    return [[cell.strip(" `") for cell in line.strip("|").split(" | ")] for line in lines if line[:1] == "|"][
        2:
    ]


def test_what_a_card_says(config, planted, tmp_path):
    train(replace(config, betas=(0.9, 0.98), weight_decay=0.0), tmp_path / "run")
    card = (tmp_path / "run/README.md").read_text()
    head = re.fullmatch(r"---\nlibrary_name: fastqt\ntags:\n((?:- [\w-]+\n)+)---\n.*", card, re.DOTALL)
    assert {"- sentence-similarity", "- fastqt", "- quickthoughts"} <= set(head[1].splitlines())
    assert "license" not in card
    assert str(tmp_path) not in card

    (file,) = rows(card, "Data")
    assert file == [
        "planted.txt",
        f"{(tmp_path / 'planted.txt').stat().st_size:,}",
        digest(tmp_path / "planted.txt"),
    ]
    options = dict(rows(card, "Options"))
    assert options["--betas"] == "0.9,0.98"
    assert options["--word-dim"] == "6"
    assert not {"--report-every", "--device", "--keep-checkpoint", "--corpus"} & options.keys()

    last = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])
    assert f"Step {last['step']}: the last report." in card
    figures = dict(rows(card, "Figures of the training"))
    assert figures["loss"] == f"{last['loss']:.4f}"
    assert not [name for name in figures if "second" in name or name == "step"]


@pytest.mark.parametrize("measure", ["dev_spearman", "validation_loss"])
def test_a_card_has_the_figures_of_the_model_that_was_kept(config, planted, tmp_path, measure):
    pairs = tmp_path / "dev.tsv"
    pairs.write_text(
        "".join(f"g\t{n % 2 * 5}\tplace{n % 6} topic{n}word1\tplace{n % 2}\n" for n in range(30))
    )
    by_pairs = measure == "dev_spearman"
    held_out = (
        {"dev": str(pairs)} if by_pairs else {"valid": planted[1], "early_stop": 9, "learning_rate": 2.0}
    )
    train(replace(config, steps=6, valid_every=1, **held_out), tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    judged = lines if by_pairs else lines[1:]  # a loss of fresh weights does not count
    best = (max if by_pairs else min)(judged, key=lambda line: line[measure])
    card = (tmp_path / "run/README.md").read_text()
    assert f"Step {best['step']}: the best one on held-out data" in card
    assert dict(rows(card, "Figures of the training"))[measure.replace("_", " ")] == f"{best[measure]:.4f}"


def test_a_card_is_written_anew_unless_it_was_edited(config, tmp_path):
    train(config, tmp_path / "run")
    path = tmp_path / "run/README.md"
    first = path.read_text()
    train(replace(config, steps=5), tmp_path / "run", resume=True)
    second = path.read_text()
    assert "Step 3:" in first
    assert "Step 5:" in second
    path.write_text(second.replace("## Data", "## Our data"))
    train(replace(config, steps=7), tmp_path / "run", resume=True)
    assert path.read_text() == second.replace("## Data", "## Our data")


def test_a_readme_of_the_user_is_kept(config, tmp_path):
    (tmp_path / "run").mkdir()
    for text in (b"# Mine\n", b"\xff"):
        (tmp_path / "run/README.md").write_bytes(text)
        train(config, tmp_path / "run", resume=True)
        assert (tmp_path / "run/README.md").read_bytes() == text


@pytest.mark.parametrize("text", ['{"tasks": ', "[]", '{"tasks": {"MR": {"accuracy": 1}}, "sha256": "0"}'])
def test_a_damaged_or_other_evaluation_is_left_out(config, tmp_path, text):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/evaluation.json").write_text(text)
    train(config, tmp_path / "run")
    assert "## Evaluation" not in (tmp_path / "run/README.md").read_text()


@pytest.mark.parametrize(
    "damage", ["5", '"x"', "{", "null", '{"step": "x", "loss": 1}', '{"step": -1}', '{"loss": 1}']
)
def test_damaged_metrics_do_not_end_a_training(config, tmp_path, damage, capsys):
    """What only tells of a run comes last, and is a warning."""
    run = tmp_path / "run"
    train(replace(config, report_every=1), run)
    metrics = run / "metrics.jsonl"
    first, *others = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join([damage.ljust(len(first) - 1) + "\n", *others]))
    capsys.readouterr()
    assert train(replace(config, report_every=1, steps=5), run, resume=True).step == 5
    assert (
        f"fastqt: warning: {metrics} is damaged in 1 of its lines, first in line 1" in capsys.readouterr().err
    )
    assert "Step 5: the last report." in (run / "README.md").read_text()
    assert closing_table(run)


def test_a_card_that_cannot_be_written_comes_with_the_next_call(config, tmp_path, monkeypatch, capsys):
    """The model and the end of the training are stored before it."""

    def full(*_):
        raise OSError(28, "No space left on device")

    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr("fastqt.sentences.runs.card.write_text", full)
        assert train(replace(config, keep_checkpoint=False), run).step == 3
    told = f"fastqt: warning: the model card {run / 'README.md'} cannot be written: No space left on device\n"
    assert told in capsys.readouterr().err
    assert (run / "finished.json").exists()
    assert not (run / "README.md").exists()
    assert train(replace(config, keep_checkpoint=False), run, resume=True).taken == 0
    assert "Step 3: the last report." in (run / "README.md").read_text()


def test_bars_and_folders(config, tmp_path):
    """A bar in a name does not end its cell, and no folder of the machine is published."""
    train(config, tmp_path / "run")
    renamed = replace(config, corpus=(str(tmp_path / "a|b\n.txt"),), valid=str(tmp_path / "held out.txt"))
    (tmp_path / "run/config.json").write_text(renamed.to_json())
    vocabulary = Vocabulary.load(tmp_path / "run/vocabulary.json")
    model = build_model(renamed, len(vocabulary))
    card = card_text(tmp_path / "run", model, progress_of(tmp_path / "run"))
    assert "| a\\|b\\n.txt | " in card
    assert dict(rows(card, "Options"))["--valid"] == "held out.txt"
    assert "| a\\|b\\n.txt |\n" in card_text(tmp_path / "run", model, None)
