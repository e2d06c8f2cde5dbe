"""The seconds of a training: a wait counts on the wall, and work for the processor too."""

import json
from dataclasses import replace

from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fastqt.sentences.runs.checkpoint import read_progress
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.runs.progress import Progress
from fastqt.sentences.train import clock, train
from fastqt.sentences.train.clock import Moment

SMALL = {"word_dim": 6, "batch_size": 48, "context_size": 1, "report_every": 1, "keep_checkpoint": True}


def test_times_are_those_of_the_two_clocks_and_are_added(monkeypatch):
    readings = iter([100.0, 107.0])
    monkeypatch.setattr(clock.time, "perf_counter", lambda: next(readings))
    monkeypatch.setattr(clock.time, "process_time", lambda: 3.5)
    earlier, later = Moment.now(), Moment.now()
    progress = Progress(seconds=10.0, cpu_seconds=1.0)
    later._replace(cpu_seconds=5.5).since(earlier).add_to(progress)
    assert (progress.seconds, progress.cpu_seconds) == (17.0, 3.0)


def test_a_resumed_training_counts_on(planted, tmp_path):
    config = TrainConfig((planted[0],), **SMALL, steps=3)
    train(config, tmp_path)
    path = tmp_path / "checkpoint.safetensors"
    with safe_open(path, framework="pt") as file:
        progress = json.loads(file.metadata()["progress"])
    assert progress["cpu_seconds"] > 0
    progress |= {"cpu_seconds": 1000.0, "seconds": 2000.0}
    save_file(load_file(path), path, {"format": "1", "progress": json.dumps(progress)})
    train(replace(config, steps=4), tmp_path, resume=True)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["cpu_seconds"] > 1000 > lines[-2]["cpu_seconds"] > lines[0]["cpu_seconds"] > 0
    assert lines[-1]["seconds"] > 2000
    # What older versions wrote does not say: it counts as none.
    del progress["cpu_seconds"]
    save_file(load_file(path), path, {"format": "1", "progress": json.dumps(progress)})
    assert read_progress(path).cpu_seconds == 0
