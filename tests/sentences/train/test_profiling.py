"""The trace of a training's steps, and its peak of memory."""

import json
import re
import sys

import pytest
import torch

from fastqt.errors import InputError
from fastqt.sentences.runs import process_memory
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.tools.memory import MIB, growth_of_process
from fastqt.sentences.train import train
from fastqt.sentences.train.profiling import peak_memory
from tests.sentences.train.test_resume import Signalling, assert_same_run

SMALL = {"word_dim": 6, "batch_size": 20, "context_size": 2, "keep_checkpoint": True}


def steps_in(path):
    """How many steps a trace has, in which each part of a step is named."""
    names = [event.get("name") for event in json.loads(path.read_text())["traceEvents"]]
    assert {"data", "gradients", "optimiser"} <= set(names)
    return names.count("gradients")


def test_a_trace_has_five_steps_after_ten_and_changes_nothing(planted, tmp_path, capsys):
    config = TrainConfig((planted[0],), **SMALL)
    train(config, tmp_path / "plain")
    train(config, tmp_path / "run", profile=str(tmp_path / "trace.json"))
    assert steps_in(tmp_path / "trace.json") == 5
    assert f"{tmp_path}/trace.json: trace of steps 11 to 15 for ui.perfetto.dev" in capsys.readouterr().err
    assert_same_run(tmp_path / "run", tmp_path / "plain")


def test_a_short_training_is_traced_as_far_as_it_goes(planted, tmp_path, capsys):
    for number in (3, 7):
        trace = tmp_path / f"{number}.json"
        train(TrainConfig((planted[0],), steps=number, **SMALL), tmp_path / str(number), profile=str(trace))
        assert steps_in(trace) == min(number, 5)
    assert "7.json: trace of steps 3 to 7" in capsys.readouterr().err
    config = TrainConfig((planted[0],), steps=9, **SMALL)
    train(config, tmp_path / "3", resume=True, profile=str(tmp_path / "9.json"))
    assert "9.json: trace of steps 5 to 9" in capsys.readouterr().err


class Early(Signalling):
    def advance(self, sentences):
        super().advance(5 * sentences // 2)  # of 20 sentences, where the test of resuming has 50


@pytest.mark.parametrize(("stop", "traced"), [(4, None), (12, 2)])
def test_a_training_that_is_stopped_keeps_what_was_traced(
    planted, tmp_path, capsys, monkeypatch, stop, traced
):
    monkeypatch.setattr(Early, "AT", stop)
    trace = tmp_path / "trace.json"
    outcome = train(TrainConfig((planted[0],), **SMALL), tmp_path / "run", display=Early, profile=str(trace))
    assert outcome.step == stop
    if traced is None:
        assert not trace.exists()
        assert "not written, because the training ended before step 11" in capsys.readouterr().err
    else:
        assert steps_in(trace) == traced
    assert not list(tmp_path.glob("*.partial"))


def test_a_file_that_cannot_be_written_is_refused_before_the_training(planted, tmp_path):
    config = TrainConfig((planted[0],), **SMALL)
    for name, message in (
        ("t.txt", r"t\.txt: want a name that ends in \.json"),
        ("no/t.json", "cannot write"),
    ):
        with pytest.raises(InputError, match=message):
            train(config, tmp_path / "run", profile=str(tmp_path / name))
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere a peak cannot begin anew")
def test_the_peak_of_memory_grows_with_what_is_allocated():
    growth_of_process(lambda: None)  # after which the peak is the memory that is in use
    before = process_memory.peak_bytes()
    torch.ones(16 * MIB)  # of four bytes each
    assert process_memory.peak_bytes() - before > 48 * MIB
    assert re.fullmatch(r"peak memory: [\d,]+ MiB of the process", peak_memory(torch.device("cpu")))
