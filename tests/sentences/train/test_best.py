"""A training stops when its held-out figures no longer improve, and keeps the model that they chose."""

import math
import signal
from dataclasses import replace

import pytest

from fastqt.errors import InputError
from fastqt.sentences.runs.checkpoint import read_progress
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.runs.progress import Progress
from fastqt.sentences.train import train
from fastqt.sentences.train.measurements import Best
from tests.shared.trainings import assert_same_run, assert_same_weights, lines_of, stopping

SMALL = {"word_dim": 6, "batch_size": 50, "context_size": 2, "report_every": 1, "valid_every": 1}
SMALL |= {"keep_checkpoint": True, "learning_rate": 0.1, "epochs": 4}


@pytest.fixture
def pairs(tmp_path):
    """Development pairs: sentences of one topic are alike."""
    path = tmp_path / "dev.tsv"
    rows = [
        f"planted\t{5 * (a == b)}\ttopic{a}word0 topic{a}word1\ttopic{b}word2"
        for a in range(9)
        for b in range(9)
    ]
    path.write_text("\n".join(rows) + "\n")
    return str(path)


def figures(run, name):
    return [line[name] for line in lines_of(run) if name in line]


def stops_after(values, patience):
    """The index of the first value that ends `patience` values of which none exceeds all before it."""
    for number in range(patience, len(values)):
        best = max(values[: number + 1])
        if values.index(best) <= number - patience:
            return number
    return len(values) - 1


@pytest.mark.parametrize(("by_pairs", "patience"), [(False, 1), (False, 3), (True, 3)])
def test_a_training_stops_and_keeps_what_its_figures_say(planted, pairs, tmp_path, by_pairs, patience):
    config = TrainConfig((planted[0],), valid=planted[1], dev=pairs if by_pairs else None, **SMALL)
    train(config, tmp_path / "whole")
    name, sign = ("dev_spearman", 1) if by_pairs else ("validation_loss", -1)
    values = [sign * value for value in figures(tmp_path / "whole", name)]
    judged = values if by_pairs else [-math.inf, *values[1:]]  # the loss of fresh weights does not count
    if by_pairs:  # which choose the model also where a training goes on, and where it is resumed
        best = values.index(max(values))
        assert 0 < best < 40
        for steps in (best, None):
            train(replace(config, steps=steps), tmp_path / "parts", resume=True)
            assert_same_weights(tmp_path / "parts", tmp_path / "whole")

    end = stops_after(judged, patience)
    assert patience < end < 40, values

    outcome = train(replace(config, early_stop=patience), tmp_path / "early")
    assert (outcome.step, outcome.stalled, outcome.stopped_by) == (end, True, None)
    assert [sign * value for value in figures(tmp_path / "early", name)] == values[: end + 1]
    best = judged.index(max(judged[: end + 1]))
    assert 0 < best == end - patience
    train(replace(config, steps=best, valid=None, dev=None), tmp_path / "best")
    assert_same_weights(tmp_path / "early", tmp_path / "best")


def test_a_resumed_training_stops_at_the_same_step_and_then_has_ended(planted, tmp_path):
    config = TrainConfig((planted[0],), valid=planted[1], early_stop=3, **SMALL)
    end = train(config, tmp_path / "whole").step
    assert train(config, tmp_path / "parts", display=stopping(2)).stopped_by == signal.SIGTERM
    assert train(config, tmp_path / "parts", resume=True).step == end
    assert_same_run(tmp_path / "parts", tmp_path / "whole")
    again = train(config, tmp_path / "parts", resume=True)
    assert (again.step, again.taken, again.stalled) == (end, 0, True)

    # With more patience it goes on, as one that had it from the start.
    patient = replace(config, early_stop=6)
    train(patient, tmp_path / "parts", resume=True)
    train(patient, tmp_path / "patient")
    assert_same_run(tmp_path / "parts", tmp_path / "patient")


def test_a_run_that_stopped_early_and_kept_no_checkpoint_has_ended(planted, tmp_path):
    config = TrainConfig((planted[0],), valid=planted[1], early_stop=1, **SMALL | {"keep_checkpoint": False})
    end = train(config, tmp_path).step
    assert not (tmp_path / "checkpoint.safetensors").exists()
    assert train(config, tmp_path, resume=True).taken == 0
    with pytest.raises(InputError, match=f"ended at step {end} and kept no checkpoint"):
        train(replace(config, early_stop=9), tmp_path, resume=True)


def test_a_model_that_training_made_worse_is_kept_as_it_was_before(planted, pairs, tmp_path):
    """Also where no validation after the first was better."""
    config = TrainConfig((planted[0],), dev=pairs, model="simcse", seed=1, **SMALL | {"context_size": 1})
    config = replace(config, learning_rate=0.0, dropout=0.0)
    train(config, tmp_path / "run")
    values = figures(tmp_path / "run", "dev_spearman")
    assert values[0] == max(values)
    progress = read_progress(tmp_path / "run" / "checkpoint.safetensors")
    assert (progress.best, progress.since_best) == (values[0], 40)


def test_a_figure_that_is_not_a_number_is_no_better():
    best = Best(TrainConfig(("x",), dev="pairs", early_stop=2), Progress())
    lines = [{"step": 1, "dev_spearman": value} for value in (float("nan"), 0.5, 0.5, float("nan"))]
    assert [best.takes(line) for line in lines] == [False, True, False, False]
    assert best.has_stalled


def test_another_measure_begins_anew():
    progress = Progress(best_loss=3.0, since_best=7)
    assert Best(TrainConfig(("x",), valid="text", early_stop=5), progress).has_stalled
    by_pairs = Best(TrainConfig(("x",), valid="text", dev="pairs", early_stop=5), progress)
    assert not by_pairs.has_stalled
    assert by_pairs.takes({"step": 9, "validation_loss": 9.0, "dev_spearman": -0.5})
    assert progress.since_best == 0


def test_a_run_that_is_resumed_without_pairs_keeps_its_last_model(planted, pairs, tmp_path):
    """Otherwise nothing of the further training would be left once its checkpoint is removed."""
    config = TrainConfig((planted[0],), **SMALL)
    train(replace(config, dev=pairs, steps=3), tmp_path / "run")
    train(replace(config, steps=6, keep_checkpoint=False), tmp_path / "run", resume=True)
    train(replace(config, steps=6), tmp_path / "plain")
    assert_same_weights(tmp_path / "run", tmp_path / "plain")
