"""A training that is stopped or killed and then resumed computes the bits of an uninterrupted one."""

import gzip
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
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fastqt.errors import InputError
from fastqt.sentences.runs.checkpoint import read_progress
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.runs.progress import save_finished
from fastqt.sentences.text import Vocabulary, batches
from fastqt.sentences.train import train
from fastqt.sentences.train.progress import Display

SMALL = {"word_dim": 6, "hidden_size": 4, "batch_size": 50, "context_size": 2}
SMALL |= {"report_every": 3, "valid_every": 7, "valid_batches": 2, "keep_checkpoint": True}


def metrics_without_times(run):
    """The lines of metrics.jsonl without the times."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: line[name] for name in line if "second" not in name} for line in lines]


def assert_same_run(one, other):
    for name in ("model.safetensors", "checkpoint.safetensors"):
        ours, theirs = load_file(one / name), load_file(other / name)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert metrics_without_times(one) == metrics_without_times(other)
    assert (one / "README.md").read_bytes() == (other / "README.md").read_bytes()
    assert not list(one.glob("*.partial"))


@pytest.mark.parametrize(
    "kind",
    [
        {"encoder": "bow"},
        {"encoder": "bigru"},
        {"model": "skip-thoughts", "context_size": 1},
        {"model": "mixcse", "encoder": "transformer", "layers": 1, "heads": 2, "context_size": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "pause",
    # Within the first pass, at its end, and after it.
    [4, pytest.param(10, marks=pytest.mark.slow), pytest.param(11, marks=pytest.mark.slow)],
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


class Signalling(Display):
    """Sends this process a signal in the middle of step `AT`."""

    NUMBER, AT = signal.SIGTERM, 130

    def advance(self, sentences):
        super().advance(sentences)
        if self.done == self.AT * 50:
            os.kill(os.getpid(), self.NUMBER)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_a_checkpoint_and_stops(planted, tmp_path, number, monkeypatch):
    config = TrainConfig((planted[0],), valid=planted[1], epochs=4, **SMALL)
    train(config, tmp_path / "whole")
    handlers = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
    monkeypatch.setattr(Signalling, "NUMBER", number)
    monkeypatch.setattr(Signalling, "AT", 8)
    outcome = train(config, tmp_path / "stopped", display=Signalling)
    assert (outcome.step, outcome.stopped_by) == (8, number)
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == handlers
    assert (tmp_path / "stopped" / "model.safetensors").exists()
    assert train(config, tmp_path / "stopped", resume=True).stopped_by is None
    assert_same_run(tmp_path / "stopped", tmp_path / "whole")


def test_resuming_a_finished_run_changes_nothing(planted, tmp_path):
    config = TrainConfig((planted[0],), **SMALL)
    train(config, tmp_path / "run")
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    outcome = train(config, tmp_path / "run", resume=True)
    assert (outcome.step, outcome.metrics) == (10, {})
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


def test_a_run_that_has_ended_keeps_no_checkpoint(planted, tmp_path):
    config = TrainConfig((planted[0],), **SMALL | {"keep_checkpoint": False})
    train(config, tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoint.safetensors").exists()
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    outcome = train(config, tmp_path / "run", resume=True)
    assert (outcome.step, outcome.taken, outcome.metrics) == (10, 0, {})
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before
    with pytest.raises(InputError, match="run ended at step 10 and kept no checkpoint from which"):
        train(replace(config, epochs=2), tmp_path / "run", resume=True)
    with pytest.raises(InputError, match="already holds a run"):
        train(config, tmp_path / "run")
    (tmp_path / "run" / "finished.json").write_text('{"format": 1}')
    with pytest.raises(InputError, match=r"finished\.json is not the progress of a run"):
        train(config, tmp_path / "run", resume=True)


def test_a_run_that_goes_on_is_no_longer_finished(planted, tmp_path):
    """A crash between the two files leaves both; the checkpoint is the one that counts."""
    config = TrainConfig((planted[0],), **SMALL | {"report_every": 1})
    train(config, tmp_path / "whole")
    train(replace(config, steps=4), tmp_path / "run")
    save_finished(tmp_path / "run", read_progress(tmp_path / "run" / "checkpoint.safetensors"))
    assert train(config, tmp_path / "run", resume=True).taken == 6
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    assert not (tmp_path / "run" / "finished.json").exists()


def test_resuming_without_a_run_starts_one(planted, tmp_path):
    config = TrainConfig((planted[0],), **SMALL)
    train(config, tmp_path / "fresh", resume=True)
    train(config, tmp_path / "plain")
    assert_same_run(tmp_path / "fresh", tmp_path / "plain")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"encoder": "gru"}, "cannot resume: encoder is 'gru', but the run was started with 'bow'"),
        ({"batch_size": 40}, "cannot resume: batch_size is 40, but the run was started with 50"),
        (
            {"learning_rate": 1.0},
            r"cannot resume: learning_rate is 1\.0, but the run was started with 0\.0005",
        ),
        ({"seed": 1}, "cannot resume: seed is 1"),
    ],
)
def test_resuming_with_other_settings_is_refused(planted, tmp_path, change, message):
    config = TrainConfig((planted[0],), steps=2, **SMALL)
    train(config, tmp_path / "run")
    with pytest.raises(InputError, match=message):
        train(replace(config, **change), tmp_path / "run", resume=True)


def test_resuming_with_a_changed_corpus_is_refused(planted, tmp_path):
    config = TrainConfig((planted[0],), steps=2, **SMALL)
    train(config, tmp_path / "run")
    with open(planted[0], "a") as file:
        file.write("\nmore")
    with pytest.raises(InputError, match=r"cannot resume: .*planted\.txt has \d+ bytes, but had \d+"):
        train(config, tmp_path / "run", resume=True)
    with pytest.raises(
        InputError, match="cannot resume: 2 corpus files given, but the run was started with 1"
    ):
        train(replace(config, corpus=(planted[0], planted[1])), tmp_path / "run", resume=True)


def test_resuming_with_a_shuffled_corpus_is_refused(planted, tmp_path):
    """Of the same size, so that only the digest tells it apart."""
    config = TrainConfig((planted[0],), steps=2, **SMALL)
    train(config, tmp_path / "run")
    text = Path(planted[0]).read_text()
    Path(planted[0]).write_text("\n\n".join(reversed(text.split("\n\n"))))
    with pytest.raises(InputError, match=r"cannot resume: .*planted\.txt has other contents than when"):
        train(replace(config, steps=3), tmp_path / "run", resume=True)
    # The same bytes under another name are the same corpus.
    (tmp_path / "copy.txt").write_text(text)
    train(replace(config, corpus=(str(tmp_path / "copy.txt"),), steps=3), tmp_path / "run", resume=True)


def test_resuming_with_swapped_words_is_refused(planted, tmp_path):
    config = TrainConfig((planted[0],), steps=2, **SMALL)
    train(config, tmp_path)
    path = tmp_path / "vocabulary.json"
    text = path.read_text()
    path.write_text(
        text.replace('"place1"', '"x"').replace('"place2"', '"place1"').replace('"x"', '"place2"')
    )
    assert path.read_text() != text
    with pytest.raises(
        InputError, match=r"cannot resume: the vocabulary in .* is not the one that the run was"
    ):
        train(replace(config, steps=3), tmp_path, resume=True)
    path.write_text(text)
    assert train(replace(config, steps=3), tmp_path, resume=True).step == 3


def test_a_run_without_digests_is_resumed_and_gets_them(planted, tmp_path, monkeypatch):
    """Older versions stored the size of the corpus alone, and no checksum."""
    config = TrainConfig((planted[0],), steps=3, **SMALL)
    train(config, tmp_path / "whole")
    train(replace(config, steps=2), tmp_path / "run")
    path = tmp_path / "run" / "checkpoint.safetensors"
    with safe_open(path, framework="pt") as file:
        progress = json.loads(file.metadata()["progress"])
    del progress["corpus_digests"], progress["vocabulary_digest"]
    save_file(load_file(path), path, {"format": "1", "progress": json.dumps(progress)})
    train(config, tmp_path / "run", resume=True)
    for name in ("model", "checkpoint"):
        ours, theirs = (load_file(tmp_path / run / f"{name}.safetensors") for run in ("run", "whole"))
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    stored = read_progress(path)
    assert len(stored.corpus_digests) == 1
    assert stored.vocabulary_digest


@pytest.mark.parametrize("kind", [{}, {"model": "simcse", "context_size": 1}], ids=str)
@pytest.mark.parametrize("pause", [4, 10, 13])
def test_a_checkpoint_from_before_several_ranks_is_resumed(planted, tmp_path, kind, pause):
    """Within an epoch, at its end and after it: then one position in the corpus was stored."""
    config = TrainConfig((planted[0],), valid=planted[1], epochs=2, **SMALL | kind)
    config = replace(config, report_every=1, valid_every=1)
    train(config, tmp_path / "whole")
    train(replace(config, steps=pause), tmp_path / "run")
    path = tmp_path / "run" / "checkpoint.safetensors"
    with safe_open(path, framework="pt") as file:
        progress = json.loads(file.metadata()["progress"])
    if "model" not in kind:
        vocabulary = Vocabulary.load(tmp_path / "run" / "vocabulary.json")
        streamed = list(batches([planted[0]], vocabulary, config.batch_size))
        progress["position"] = streamed[(pause - 1) % 10].position
    del progress["taken"], progress["spans"]
    save_file(load_file(path), path, {"format": "1", "progress": json.dumps(progress)})
    train(config, tmp_path / "run", resume=True)
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_a_corpus_that_lost_its_sentences_ends_the_training(planted, tmp_path):
    """An old checkpoint may tell of batches that there are not; they must not be looked for without end."""
    config = TrainConfig((planted[0],), model="simcse", steps=2, **SMALL | {"context_size": 1})
    train(config, tmp_path)
    corpus = Path(planted[0])
    corpus.write_text("\n" * corpus.stat().st_size)
    path = tmp_path / "checkpoint.safetensors"
    with safe_open(path, framework="pt") as file:
        progress = json.loads(file.metadata()["progress"]) | {"corpus_digests": []}
    save_file(load_file(path), path, {"format": "1", "progress": json.dumps(progress)})
    with pytest.raises(InputError, match="the corpus has changed: no batch in"):
        train(replace(config, steps=3), tmp_path, resume=True)


def test_a_second_training_in_the_directory_is_refused(planted, tmp_path):
    config = TrainConfig((planted[0],), **SMALL)
    messages = []

    class Second(Display):
        """Starts another training at the first report of this one."""

        def report(self, line):
            for resume in (False, True):
                with pytest.raises(InputError) as error:
                    train(config, tmp_path, resume=resume)
                messages.append(str(error.value))

    train(config, tmp_path, display=Second)
    who = f"{tmp_path}: process {os.getpid()} on host {os.uname().nodename} is writing in it"
    assert len(messages) > 2
    assert all(message.startswith(who) for message in messages)
    assert train(config, tmp_path, resume=True).step == 10


def test_what_a_killed_training_was_writing_is_removed(planted, tmp_path):
    config = TrainConfig((planted[0],), **SMALL)
    train(config, tmp_path)
    for name in ("checkpoint.safetensors.0123abcd.partial", "config.json.partial"):
        (tmp_path / name).touch()
    (tmp_path / "mine.partial").touch()
    train(config, tmp_path, resume=True)
    assert [path.name for path in tmp_path.glob("*.partial")] == ["mine.partial"]


def test_a_damaged_checkpoint_is_refused(planted, tmp_path):
    config = TrainConfig((planted[0],), steps=2, **SMALL)
    train(config, tmp_path / "run")
    checkpoint = tmp_path / "run" / "checkpoint.safetensors"
    checkpoint.write_bytes(checkpoint.read_bytes()[:-10])
    with pytest.raises(InputError, match=r"checkpoint\.safetensors is damaged"):
        train(config, tmp_path / "run", resume=True)
    checkpoint.write_bytes((tmp_path / "run" / "model.safetensors").read_bytes())
    with pytest.raises(InputError, match=r"checkpoint\.safetensors is not a checkpoint of this version"):
        train(config, tmp_path / "run", resume=True)


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
    config = TrainConfig(
        (planted[0],), valid=planted[1], epochs=1_000_000, checkpoint_every=5, **SMALL | {"valid_every": 50}
    )
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
