"""What the tests of trainings share: a training step by step, its figures, and what stops it in its midst."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from fastqt.sentences.runs.checkpoint import read_progress
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.runs.progress import Progress
from fastqt.sentences.text import Vocabulary
from fastqt.sentences.train.loop import Trainer
from fastqt.sentences.train.objectives import Training
from fastqt.sentences.train.progress import Display
from tests.shared.rank_pool import Pool
from tests.shared.trained_on_ranks import Seen, trained


def trainer_of(config: TrainConfig, folder: Path, progress: Progress | None = None) -> Trainer:
    """The training of a text by itself, by default in its first pass over 500 sentences."""
    vocabulary = Vocabulary.build(Path(config.corpus[0]).read_text().splitlines(), config.vocab_size)
    training = Training(config, [config.corpus[0]], vocabulary, folder, progress or Progress(sentences=500))
    return Trainer(training)


def lines_of(run: Path) -> list[dict]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def metrics(run: Path) -> list[dict]:
    """The lines of metrics.jsonl without that of fresh weights."""
    return [line for line in lines_of(run) if line["step"]]


def metrics_without_times(run: Path) -> list[dict]:
    return [{name: line[name] for name in line if "second" not in name} for line in lines_of(run)]


def assert_same_weights(one: Path, other: Path) -> None:
    ours, theirs = (load_file(run / "model.safetensors") for run in (one, other))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def assert_same_run(one: Path, other: Path) -> None:
    """The bits of two runs are equal, and all that they tell but for times."""
    assert_same_weights(one, other)
    ours, theirs = (load_file(run / "checkpoint.safetensors") for run in (one, other))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    ours, theirs = (
        replace(read_progress(run / "checkpoint.safetensors"), seconds=0, cpu_seconds=0, metrics_length=0)
        for run in (one, other)
    )
    assert ours == theirs
    assert metrics_without_times(one) == metrics_without_times(other)
    assert not list(one.glob("*.partial"))


def on_ranks(pool: Pool, ranks: int, *arguments: Any) -> list[Seen]:
    """What `trained` returns on each rank, all of which must succeed."""
    answers = pool.run(ranks, trained, *arguments)
    for answer in answers:
        assert isinstance(answer, Seen), answers
    return answers


def stopping(at: int, number: int = signal.SIGTERM) -> type[Display]:
    """A display that sends this process a signal in the middle of the step with the number `at` of a call."""

    class Stopping(Display):
        steps = 0

        def advance(self, sentences):
            super().advance(sentences)
            self.steps += 1
            if self.steps == at:
                os.kill(os.getpid(), number)

    return Stopping
