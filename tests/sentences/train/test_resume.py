"""A training that is stopped or killed and then resumed computes the bits of an uninterrupted one."""

import gzip
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fastqt.engines import ops
from fastqt.errors import InputError
from fastqt.sentences.inference.encoder import SentenceEncoder
from fastqt.sentences.runs.checkpoint import read_progress
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.runs.progress import save_finished
from fastqt.sentences.train import train
from fastqt.sentences.train.objectives import Objective
from fastqt.sentences.train.progress import Display
from fastqt.sentences.train.schedule import Factor
from tests.shared.tolerances import ADAM_STEPS, relative
from tests.shared.trainings import assert_same_run, lines_of, metrics, metrics_without_times, stopping

SMALL = {"word_dim": 6, "hidden_size": 4, "batch_size": 50, "context_size": 2}
SMALL |= {"report_every": 3, "valid_every": 7, "valid_batches": 2, "keep_checkpoint": True}
TRANSFORMER = {"encoder": "transformer", "layers": 1, "heads": 2, "feedforward": 8, "dropout": 0.2}
BOW = {"encoder": "bow"}
MIXED = {"model": "mixcse", "context_size": 1, **TRANSFORMER}


def stored_progress(run):
    with safe_open(run / "checkpoint.safetensors", framework="pt") as file:
        return json.loads(file.metadata()["progress"])


def store(run, progress):
    """Writes a checkpoint anew with another progress, and without a checksum."""
    path = run / "checkpoint.safetensors"
    save_file(load_file(path), path, {"format": "1", "progress": json.dumps(progress)})


def contents(run):
    return {path.name: path.read_bytes() for path in run.iterdir()}


@pytest.mark.parametrize(
    ("kind", "pause"),  # within the first pass, at its end, and after it
    [
        (BOW, 4),
        ({"encoder": "bigru"}, 4),
        ({"model": "skip-thoughts", "context_size": 1}, 4),
        (MIXED, 4),
        *(pytest.param(kind, pause, marks=pytest.mark.slow) for kind in (BOW, MIXED) for pause in (10, 11)),
    ],
    ids=str,
)
def test_a_run_in_two_parts(planted, tmp_path, kind, pause):
    second = tmp_path / "second.txt.gz"
    second.write_bytes(gzip.compress(b"one two\n\nthree topic1word1\n" * 9))
    config = TrainConfig((planted[0], str(second)), valid=planted[1], epochs=3, **SMALL | kind)
    # A run reports and validates at its last step. It does so at every step here, so that the pause adds no
    # line.
    config = replace(config, report_every=1, valid_every=1)
    train(config, tmp_path / "whole")
    train(replace(config, steps=pause), tmp_path / "parts")
    outcome = train(config, tmp_path / "parts", resume=True)
    assert outcome.step == 30
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_a_checkpoint_and_stops(planted, tmp_path, number):
    config = TrainConfig((planted[0],), valid=planted[1], epochs=4, **SMALL)
    train(config, tmp_path / "whole")
    handlers = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
    outcome = train(config, tmp_path / "stopped", display=stopping(8, number))
    assert (outcome.step, outcome.stopped_by) == (8, number)
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == handlers
    assert (tmp_path / "stopped" / "model.safetensors").exists()
    assert train(config, tmp_path / "stopped", resume=True).stopped_by is None
    assert_same_run(tmp_path / "stopped", tmp_path / "whole")


@pytest.mark.parametrize(
    "options",
    [
        {"encoder": "gru"},
        {"learn_scale": True, "precision": "float16", **MIXED},
        {"model": "simcse", "chunk": 16, "learn_scale": True, "precision": "float16", **TRANSFORMER},
        {"model": "simcse", "masked_words": 0.5, "precision": "bfloat16", **TRANSFORMER},
        {"model": "mixcse", "form": "released", "partner": "random"},
        {"encoder": "combine"},
        {"schedule": "cosine", "warmup": 0.4, "optimizer": "adamw", **TRANSFORMER},
        {"schedule": "linear", "warmup": 8, "optimizer": "adamw", "weight_decay": 0.0, "betas": (0.9, 0.98)},
        {"model": "gloss-bow", "schedule": "linear", "warmup": 8},
    ],
    ids=str,
)
@pytest.mark.thinned(3)
def test_what_options_keep_from_step_to_step_is_resumed(planted, tmp_path, options):
    """A warm-up is stopped in its midst."""
    settings = SMALL | {"context_size": 1, "report_every": 1, "checkpoint_every": 100, "epochs": 2} | options
    config = TrainConfig((planted[0],), valid=planted[1], **settings)
    train(config, tmp_path / "whole")
    assert train(config, tmp_path / "parts", display=stopping(4)).stopped_by == signal.SIGTERM
    stored = read_progress(tmp_path / "parts" / "checkpoint.safetensors")
    assert (stored.loss_scale > 0) == (config.precision == "float16")
    train(TrainConfig.load(tmp_path / "parts" / "config.json"), tmp_path / "parts", resume=True)
    assert_same_run(tmp_path / "parts", tmp_path / "whole")

    lines = metrics(tmp_path / "parts")
    if config.learn_scale:
        assert len({line["scale"] for line in lines}) >= 10  # a step whose gradients overflow keeps it
        assert SentenceEncoder.load(tmp_path / "whole").model.loss.log_scale is not None
    if config.schedule != "constant":
        rates, factor = [line["learning_rate"] for line in lines], Factor(config, 20)
        assert rates == [config.learning_rate * factor(step) for step in range(20)]
        assert max(rates) == rates[7] == config.learning_rate


@pytest.mark.parametrize("pause", [3, 10])
def test_a_run_whose_rows_all_moved_goes_on(planted, tmp_path, monkeypatch, pause):
    """Such as one of an older version, or of several ranks. Its curve is that of rows that are replayed."""
    settings = SMALL | BOW | {"report_every": 1, "epochs": 2}
    config = TrainConfig((planted[0],), valid=planted[1], **settings)
    with monkeypatch.context() as patch:
        patch.setattr(Objective, "_moved_rows", "all")
        train(config, tmp_path / "dense")
        train(replace(config, steps=pause), tmp_path / "parts")
    stored = load_file(tmp_path / "parts" / "checkpoint.safetensors")
    assert not any(name.startswith(("optimizer.last", "optimizer.rates")) for name in stored)
    train(config, tmp_path / "replayed")
    train(config, tmp_path / "parts", resume=True)

    dense = load_file(tmp_path / "dense" / "model.safetensors")
    for name in ("replayed", "parts"):
        found = load_file(tmp_path / name / "model.safetensors")
        assert all(relative(found[key], weights) < ADAM_STEPS for key, weights in dense.items())
        assert found.keys() == dense.keys()
        stored = load_file(tmp_path / name / "checkpoint.safetensors")
        assert any(name.startswith("optimizer.last") for name in stored) == (ops.native_error is None)
        for one, other in zip(metrics(tmp_path / name), metrics(tmp_path / "dense"), strict=True):
            assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)


def test_resuming_a_run_that_has_ended_changes_nothing(planted, tmp_path):
    for name, keeps in (("kept", True), ("run", False)):
        config, run = TrainConfig((planted[0],), **SMALL | {"keep_checkpoint": keeps}), tmp_path / name
        train(config, run)
        assert (run / "checkpoint.safetensors").exists() == keeps
        before = contents(run)
        outcome = train(config, run, resume=True)
        assert (outcome.step, outcome.taken, outcome.metrics) == (10, 0, {})
        with pytest.raises(InputError, match="already holds a run: resume it, or choose another directory"):
            train(config, run)
        assert contents(run) == before
    with pytest.raises(InputError, match="run ended at step 10 and kept no checkpoint from which"):
        train(replace(config, epochs=2), run, resume=True)
    (run / "finished.json").write_text('{"format": 1}')
    with pytest.raises(InputError, match=r"finished\.json is not the progress of a run"):
        train(config, run, resume=True)


def test_a_run_that_goes_on_is_no_longer_finished(planted, tmp_path):
    """A crash between the two files leaves both; the checkpoint is the one that counts."""
    config = TrainConfig((planted[0],), **SMALL | {"report_every": 1})
    train(config, tmp_path / "whole")
    train(replace(config, steps=4), tmp_path / "run")
    save_finished(tmp_path / "run", read_progress(tmp_path / "run" / "checkpoint.safetensors"))
    assert train(config, tmp_path / "run", resume=True).taken == 6
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    assert not (tmp_path / "run" / "finished.json").exists()


def test_resuming_with_other_settings_is_refused(planted, tmp_path):
    config = TrainConfig((planted[0],), steps=2, **SMALL)
    train(config, tmp_path / "run")
    for change, message in (
        ({"encoder": "gru"}, "cannot resume: encoder is 'gru', but the run was started with 'bow'"),
        ({"learning_rate": 1.0}, "cannot resume: learning_rate is 1.0, but the run was started with 0.0005"),
        ({"precision": "bfloat16"}, "cannot resume: precision is 'bfloat16', but the run was started with"),
        ({"corpus": planted}, r"cannot resume: corpus is \(.*, .*\), but the run was started with \(.*,\)"),
    ):
        with pytest.raises(InputError, match=message):
            train(replace(config, **change), tmp_path / "run", resume=True)


def test_resuming_with_a_changed_corpus_is_refused(planted, tmp_path):
    config = TrainConfig((planted[0],), steps=2, **SMALL)
    train(config, tmp_path / "run")
    text = Path(planted[0]).read_text()
    # Of the same size, only the digest tells a text apart.
    for other, message in (
        (text + "\nmore", r"cannot resume: .*planted\.txt has \d+ bytes, but had \d+"),
        ("\n\n".join(reversed(text.split("\n\n"))), r"cannot resume: .*planted\.txt has other contents than"),
    ):
        Path(planted[0]).write_text(other)
        with pytest.raises(InputError, match=message):
            train(replace(config, steps=3), tmp_path / "run", resume=True)
    # The same bytes under another name are the same corpus.
    (tmp_path / "copy.txt").write_text(text)
    train(replace(config, corpus=(str(tmp_path / "copy.txt"),), steps=3), tmp_path / "run", resume=True)


def test_a_corpus_that_lost_its_sentences_ends_the_training(planted, tmp_path):
    """A corpus may change while it is read; batches that there are not must not be looked for without end."""
    config = TrainConfig((planted[0],), model="simcse", steps=2, **SMALL | {"context_size": 1})
    train(config, tmp_path)
    corpus = Path(planted[0])
    corpus.write_text("\n" * corpus.stat().st_size)
    changed = {"corpus_digests": [hashlib.sha256(corpus.read_bytes()).hexdigest()]}
    store(tmp_path, stored_progress(tmp_path) | changed)
    with pytest.raises(InputError, match="the corpus has changed: no batch in"):
        train(replace(config, steps=3), tmp_path, resume=True)


def test_seconds_are_counted_on(planted, tmp_path):
    config = TrainConfig((planted[0],), **SMALL | {"report_every": 1}, steps=3)
    train(config, tmp_path)
    progress = stored_progress(tmp_path)
    assert progress["cpu_seconds"] > 0
    progress |= {"cpu_seconds": 1000.0, "seconds": 2000.0}
    store(tmp_path, progress)
    train(replace(config, steps=4), tmp_path, resume=True)
    lines = lines_of(tmp_path)
    assert lines[-1]["cpu_seconds"] > 1000 > lines[-2]["cpu_seconds"] > lines[0]["cpu_seconds"] > 0
    assert lines[-1]["seconds"] > 2000


def test_a_second_training_in_the_directory_is_refused(planted, tmp_path):
    config = TrainConfig((planted[0],), **SMALL)
    messages = []

    class Second(Display):
        """Starts another training at each report of this one."""

        def report(self, line):
            for resume in (False, True):
                with pytest.raises(InputError) as error:
                    train(config, tmp_path, resume=resume)
                messages.append(str(error.value))

    train(config, tmp_path, display=Second)
    who = f"{tmp_path}: process {os.getpid()} on host {os.uname().nodename} is writing in it"
    assert len(messages) > 2
    assert all(message.startswith(who) for message in messages)


def test_what_a_killed_training_was_writing_is_removed(planted, tmp_path):
    config = TrainConfig((planted[0],), **SMALL)
    train(config, tmp_path)
    for name in ("checkpoint.safetensors.0123abcd.partial", "config.json.partial"):
        (tmp_path / name).touch()
    (tmp_path / "mine.partial").touch()
    train(config, tmp_path, resume=True)
    assert [path.name for path in tmp_path.glob("*.partial")] == ["mine.partial"]


# This process runs the training of its first line of input, so that everything is imported, and then forks a
# process for the training of each further line. It has one thread only, because other threads would not
# survive the fork.
TRAINER = """
import json, os, sys
import torch
from fastqt.sentences.runs.config import TrainConfig, with_tuples
from fastqt.sentences.train import train
torch.set_num_threads(1)

def run(line):
    settings, out = json.loads(line)
    train(TrainConfig(**with_tuples(settings)), out, resume=True)

run(sys.stdin.readline())
print("ready", flush=True)
for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        run(line)
        os._exit(0)
    print(pid, flush=True)
    print(os.waitpid(pid, 0)[1], flush=True)
"""


@pytest.mark.slow
def test_kill_9_at_random_moments(planted, tmp_path):
    settings = SMALL | {"epochs": 1_000_000, "checkpoint_every": 5, "valid_every": 50}
    config = TrainConfig((planted[0],), valid=planted[1], **settings)
    checkpoint = tmp_path / "killed" / "checkpoint.safetensors"
    generator = random.Random(0)
    with subprocess.Popen(
        [sys.executable, "-c", TRAINER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"TOKENIZERS_PARALLELISM": "false"},
        text=True,
    ) as trainer:

        def ask(settings, out):
            print(json.dumps([asdict(settings), str(out)]), file=trainer.stdin, flush=True)
            return trainer.stdout.readline()

        assert ask(replace(config, steps=1), tmp_path / "first") == "ready\n"
        steps = []
        for _ in range(24):
            pid = int(ask(config, tmp_path / "killed"))
            time.sleep(generator.uniform(0.0, 0.6))
            os.kill(pid, signal.SIGKILL)
            assert int(trainer.stdout.readline()) == signal.SIGKILL
            steps.append(read_progress(checkpoint).step if checkpoint.exists() else 0)
        # Many of the processes saved a new checkpoint before they were killed, and some did not.
        assert steps == sorted(steps)
        assert len(set(steps)) > 8
        for out in ("killed", "whole"):
            ask(replace(config, steps=steps[-1] + 7), tmp_path / out)
            assert int(trainer.stdout.readline()) == 0
        trainer.stdin.close()
    assert_same_run(tmp_path / "killed", tmp_path / "whole")
    assert metrics_without_times(tmp_path / "killed")[-1]["step"] == steps[-1] + 7
