"""--log: each line of metrics.jsonl goes to TensorBoard or to Weights & Biases too."""

import sys
from types import SimpleNamespace

import pytest

from fastqt.errors import InputError
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.train import train
from tests.shared.trainings import lines_of

SMALL = {"word_dim": 6, "batch_size": 48, "context_size": 1, "device": "cpu", "report_every": 4}


class FakeRun:
    """What of a run of W&B is used."""

    def __init__(self, **options):
        self.options, self.lines, self.finished = options, [], 0

    def log(self, figures, *, step):
        self.lines.append({"step": step, **figures})

    def finish(self):
        self.finished += 1


@pytest.fixture
def wandb(monkeypatch):
    """A module of that name, with the runs that were begun."""
    runs = []

    def init(**options):
        runs.append(FakeRun(**options))
        return runs[-1]

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(__version__="0.30", init=init))
    return runs


def test_wandb_has_the_settings_and_every_stored_line(planted, tmp_path, wandb):
    config = TrainConfig((planted[0],), valid=planted[1], log="wandb", **SMALL)
    train(config, tmp_path / "run")
    (run,) = wandb
    assert run.lines == lines_of(tmp_path / "run")
    assert [line["step"] for line in run.lines] == [0, 4, 8, 10]
    assert "validation_loss" in run.lines[0]
    assert (run.options["name"], run.options["dir"]) == ("run", str(tmp_path / "run"))
    assert run.options["config"]["word_dim"] == 6
    assert run.finished == 1


def test_a_logger_without_room_does_not_end_a_training(planted, tmp_path, wandb, monkeypatch, capsys):
    def full(self, figures, *, step):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(FakeRun, "log", full)
    assert train(TrainConfig((planted[0],), log="wandb", **SMALL), tmp_path / "run").step == 10
    assert "log: No space left on device; the training goes on" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_library_that_is_not_there_is_told_before_any_work(planted, tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InputError, match=rf"^log: want {name} >= .*: pip install 'fastqt\[{name}\]'$"):
        train(TrainConfig((planted[0],), log=name, **SMALL), tmp_path / "run")
    assert not (tmp_path / "run" / "config.json").exists()


def test_tensorboard_reads_the_figures(planted, tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(TrainConfig((planted[0],), log="tensorboard", **SMALL), tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    lines = lines_of(tmp_path)
    for name in ("loss", "forward_accuracy"):
        stored = [(event.step, event.value) for event in events.Scalars(name)]
        assert stored == [(line["step"], pytest.approx(line[name], rel=1e-6)) for line in lines]
