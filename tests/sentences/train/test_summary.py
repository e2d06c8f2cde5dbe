"""The end of a training: its figures beside those of chance; and the model card of an export."""

import json
import re
from dataclasses import replace

import pytest

from fastqt.sentences.runs.card import Usage, card_text, progress_of
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.runs.files import digest
from fastqt.sentences.runs.model import build_model
from fastqt.sentences.text import Vocabulary
from fastqt.sentences.train import train
from fastqt.sentences.train.summary import closing_table, diagnoses, speed
from tests.shared.trainings import lines_of


def write(directory, *lines):
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return closing_table(directory)


def cells(table):
    """The cells of each line, which two spaces or more stand between."""
    return [re.split(" {2,}", line) for line in table.splitlines()]


def held_out(step, loss, forward):
    figures = {"step": step, "validation_loss": loss, "validation_forward_accuracy": forward}
    return figures | {"validation_chance": 0.005}


def test_held_out_figures_stand_beside_fresh_weights_and_chance(tmp_path):
    table = write(
        tmp_path,
        held_out(0, 6, 0.004),
        {"step": 5, "loss": 4, "forward_accuracy": 0.9, "chance": 0.01},
        held_out(1000, 5, 0.125) | {"loss": 3.0, "seconds": 5.0},
    )
    assert cells(table) == [
        ["held out", "fresh weights", "step 1,000", "chance"],
        ["loss", "6.000", "5.000", "–"],
        ["forward accuracy", "0.40%", "12.50%", "0.50%"],
    ]
    assert len({len(line) for line in table.splitlines()}) == 1


def test_the_model_that_was_kept_is_named(tmp_path):
    """As development pairs have chosen it, or the loss, of which that of fresh weights does not count."""
    figures = [(0, 0.3), (125, 0.7), (250, 0.6)]
    table = write(tmp_path, *({"step": step, "dev_spearman": value} for step, value in figures))
    assert cells(table) == [
        ["held out", "fresh weights", "step 125, kept", "step 250", "chance"],
        ["dev spearman", "0.300", "0.700", "0.600", "0.000"],
    ]
    figures = [(0, 0.7), (125, 0.5), (250, 0.6)]
    table = write(tmp_path, *({"step": step, "loss": 1, "dev_spearman": value} for step, value in figures))
    assert cells(table)[0] == ["held out", "fresh weights, kept", "step 250", "chance"]
    (said,) = diagnoses(tmp_path)
    assert "worse on --dev: Spearman's coefficient was 0.700 before the first step, and 0.600 at best" in said

    write(tmp_path, *(held_out(step, loss, 0.1) for step, loss in ((0, 2), (10, 4), (20, 3), (30, 5))))
    titles = cells(closing_table(tmp_path, "validation_loss"))[0]
    assert titles == ["held out", "fresh weights", "step 20, kept", "step 30", "chance"]
    assert "kept" not in closing_table(tmp_path, None)


def test_without_held_out_text_the_last_report_is_shown(tmp_path):
    table = write(tmp_path, {"step": 7, "loss": 2.5, "forward_accuracy": 0.25, "chance": 0.01, "seconds": 1})
    assert cells(table) == [
        ["corpus, last report", "step 7", "chance"],
        ["loss", "2.500", "–"],
        ["forward accuracy", "25.00%", "1.00%"],
    ]
    table = write(tmp_path, {"step": 7, "loss": 2.5})
    assert cells(table) == [["corpus, last report", "step 7"], ["loss", "2.500"]]
    assert write(tmp_path) == ""


def reported(step, **figures):
    """A line of a report, of which half of the time went into the data."""
    times = {"data_seconds": 2.0, "gradients_seconds": 1.5, "optimiser_seconds": 0.5}
    rates = {"sentences_per_second": 100.0, "tokens_per_second": 1500.0}
    line = {"step": step, "loss": 3.0, "forward_accuracy": 0.5, "backward_accuracy": 0.5, "chance": 0.01}
    return line | times | rates | figures


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
    fine = {"uniformity": -2.0, "loss": 2.0, "loss_scale": 65536.0}
    write(tmp_path, held_out(0, 6, 0.004), reported(1), reported(2, **fine))
    assert diagnoses(tmp_path) == []


SMALL = {"word_dim": 6, "batch_size": 50, "context_size": 2, "steps": 3, "keep_checkpoint": True}


@pytest.fixture
def config(planted):
    return TrainConfig((planted[0],), **SMALL)


def rows(card, section):
    """The cells of the table of a section."""
    lines = card.split(f"## {section}\n")[1].split("\n## ")[0].splitlines()
    _, _, *table = [line.strip("|").split(" | ") for line in lines if line.startswith("|")]
    return [[cell.strip(" `") for cell in row] for row in table]


def card_of(run, config=None):
    """The card of an export of a run."""
    vocabulary = Vocabulary.load(run / "vocabulary.json")
    config = config or TrainConfig.load(run / "config.json")
    model = build_model(config, len(vocabulary))
    return card_text(run, config, model, progress_of(run), Usage("onnx", "It is loaded so.\n"), "0")


def test_what_a_card_says(config, planted, tmp_path):
    train(replace(config, betas=(0.9, 0.98), weight_decay=0.0), tmp_path / "run")
    card = card_of(tmp_path / "run")
    head = re.fullmatch(r"---\nlibrary_name: onnx\ntags:\n((?:- [\w-]+\n)+)---\n.*", card, re.DOTALL)
    assert {"- sentence-similarity", "- fastqt", "- quickthoughts"} <= set(head[1].splitlines())
    assert "license" not in card
    assert str(tmp_path) not in card

    path = tmp_path / "planted.txt"
    assert rows(card, "Data") == [["planted.txt", f"{path.stat().st_size:,}", digest(path)]]
    options = dict(rows(card, "Options"))
    assert options["--betas"] == "0.9,0.98"
    assert options["--word-dim"] == "6"
    assert not {"--report-every", "--device", "--keep-checkpoint", "--corpus"} & options.keys()

    last = lines_of(tmp_path / "run")[-1]
    assert f"Step {last['step']}: the last report." in card
    figures = dict(rows(card, "Figures of the training"))
    assert figures["loss"] == f"{last['loss']:.4f}"
    assert not [name for name in figures if "second" in name or name == "step"]


@pytest.mark.parametrize("measure", ["dev_spearman", "validation_loss"])
def test_a_card_has_the_figures_of_the_model_that_was_kept(config, planted, tmp_path, measure):
    pairs = tmp_path / "dev.tsv"
    text = (f"g\t{n % 2 * 5}\tplace{n % 6} topic{n}word1\tplace{n % 2}\n" for n in range(30))
    pairs.write_text("".join(text))
    by_pairs = measure == "dev_spearman"
    by_loss = {"valid": planted[1], "early_stop": 9, "learning_rate": 2.0}
    chosen_by = {"dev": str(pairs)} if by_pairs else by_loss
    train(replace(config, steps=6, valid_every=1, **chosen_by), tmp_path / "run")
    lines = lines_of(tmp_path / "run")
    judged = lines if by_pairs else lines[1:]  # a loss of fresh weights does not count
    best = (max if by_pairs else min)(judged, key=lambda line: line[measure])
    card = card_of(tmp_path / "run")
    assert f"Step {best['step']}: the best one on held-out data" in card
    assert dict(rows(card, "Figures of the training"))[measure.replace("_", " ")] == f"{best[measure]:.4f}"


@pytest.mark.parametrize("damage", ["5", "{", '{"step": "x", "loss": 1}', '{"step": -1}', '{"loss": 1}'])
def test_damaged_metrics_do_not_end_a_training(config, tmp_path, damage, capsys):
    """What only tells of a run comes last, and is a warning."""
    run = tmp_path / "run"
    train(replace(config, report_every=1), run)
    metrics = run / "metrics.jsonl"
    first, *others = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join([damage.ljust(len(first) - 1) + "\n", *others]))
    assert train(replace(config, report_every=1, steps=5), run, resume=True).step == 5
    warning = f"fastqt: warning: {metrics} is damaged in 1 of its lines, first in line 1"
    for tell in (card_of, closing_table):
        capsys.readouterr()
        assert "5" in tell(run)
        assert warning in capsys.readouterr().err


def test_bars_and_folders(config, tmp_path):
    """A bar in a name does not end its cell, and no folder of the machine is published."""
    train(config, tmp_path / "run")
    renamed = replace(config, corpus=(str(tmp_path / "a|b\n.txt"),), valid=str(tmp_path / "held out.txt"))
    card = card_of(tmp_path / "run", renamed)
    assert "| a\\|b\\n.txt | " in card
    assert dict(rows(card, "Options"))["--valid"] == "held out.txt"


def test_results_of_another_model_or_damaged_ones_are_left_out(config, tmp_path):
    train(config, tmp_path / "run")
    for text in ('{"tasks": ', "[]", '{"tasks": {"MR": {"accuracy": 1}}, "identity": "0"}'):
        (tmp_path / "run" / "evaluation.json").write_text(text)
        assert "## Evaluation" not in card_of(tmp_path / "run")
