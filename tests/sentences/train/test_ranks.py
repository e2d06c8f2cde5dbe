"""Several processes train one model: what they read, compute and save, and when they stop."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fastqt.errors import InputError
from fastqt.sentences.errors import OtherRankError
from fastqt.sentences.runs.checkpoint import read_generators, read_progress
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.runs.progress import Progress
from fastqt.sentences.text import Batch, Position, Span, Vocabulary
from fastqt.sentences.text.batches import span_batches, split
from fastqt.sentences.train import train
from fastqt.sentences.train.loop import Trainer
from tests.sentences.train.test_resume import assert_same_run, metrics_without_times
from tests.shared.rank_pool import Pool
from tests.shared.trained_on_ranks import summed_gradients, trained

SENTENCES = 403
SMALL = {
    "keep_checkpoint": True,
    "word_dim": 6,
    "batch_size": 20,
    "context_size": 2,
    "report_every": 1,
    "timeout": 60,
}


@pytest.fixture(scope="module")
def pool():
    pool = Pool(4)
    yield pool
    pool.close()


@pytest.fixture
def numbered(tmp_path):
    """A text of 403 sentences in documents of 4 and 5, each of which begins with a word of its own."""
    lines = []
    for number in range(SENTENCES):
        lines.append(f"s{number} word{number % 7} word{number % 5}")
        if number % 9 in (0, 4):
            lines.append("")
    path = tmp_path / "numbered.txt"
    path.write_text("\n".join(lines))
    return str(path)


def together(pool, ranks, *arguments):
    """What `trained` returns on each rank, all of which must succeed."""
    answers = pool.run(ranks, trained, *arguments)
    for answer in answers:
        assert isinstance(answer, tuple), answers
    return answers


@pytest.mark.parametrize("options", [{}, {"documents": "cross"}, {"model": "simcse"}], ids=str)
def test_4_then_2_then_3_ranks_take_every_sentence_once_an_epoch(pool, numbered, tmp_path, options):
    config = TrainConfig((numbered,), epochs=2, **SMALL | options)
    seen = Counter()
    for ranks, steps in ((4, 2), (2, 5), (3, None)):
        answers = together(pool, ranks, replace(config, steps=steps), tmp_path / "run", True)
        assert len({(answer.step, len(answer.batches)) for answer in answers}) == 1
        for answer in answers:
            seen.update(word for batch in answer.batches for word, _ in batch)
            for batch in answer.batches if "model" not in options else ():
                assert_neighbours(batch)
    assert seen == {f"s{number}": 2 for number in range(SENTENCES)}


def assert_neighbours(batch):
    """Sentences that a window joins in a batch follow each other in the text."""
    numbers = [int(word[1:]) for word, _ in batch]
    for (one, other), (number, after) in zip(pairwise(batch), pairwise(numbers), strict=True):
        assert after == number + 1 or one[1] != other[1]


def test_one_process_finishes_what_several_began(pool, numbered, tmp_path):
    config = TrainConfig((numbered,), epochs=2, **SMALL)
    seen = Counter()
    for ranks, steps in ((3, 2), (1, 9), (2, None)):
        for answer in together(pool, ranks, replace(config, steps=steps), tmp_path / "run", True):
            seen.update(word for batch in answer.batches for word, _ in batch)
    assert seen == {f"s{number}": 2 for number in range(SENTENCES)}


@pytest.mark.parametrize(
    "kind",
    [
        {},
        pytest.param({"model": "gloss-bow"}, marks=pytest.mark.slow),
        {"model": "simcse", "dropout": 0.2},
        {"model": "skip-thoughts", "context_size": 1, "hidden_size": 4},
    ],
    ids=str,
)
def test_ranks_have_equal_bits_and_a_resumed_training_has_those_of_a_whole_one(
    pool, numbered, tmp_path, kind
):
    config = TrainConfig(
        (numbered,), valid=numbered, valid_every=1, valid_batches=1, epochs=2, **SMALL | kind
    )
    for name, pauses in (("whole", (None,)), ("parts", (3, 6, None))):
        for steps in pauses:
            answers = together(pool, 3, replace(config, steps=steps), tmp_path / name, True)
            assert len({answer.parameters for answer in answers}) == 1
            assert len({answer.generator for answer in answers}) == 3, "the same dropout on two ranks"
    assert_same_run(tmp_path / "parts", tmp_path / "whole")
    assert len(read_generators(tmp_path / "whole" / "checkpoint.safetensors")) == 3


def test_ranks_stop_early_at_the_same_step_with_an_average_also_when_resumed(pool, numbered, tmp_path):
    """Rank 0 alone has the average, and tells the others when its figures no longer improve."""
    config = TrainConfig((numbered,), valid=numbered, valid_every=1, valid_batches=1, epochs=4, **SMALL)
    config = replace(config, average=0.5, early_stop=2, learning_rate=0.5)
    for name, pauses in (("whole", (None,)), ("parts", (2, None))):
        for steps in pauses:
            answers = together(pool, 3, replace(config, steps=steps), tmp_path / name, True)
            assert len({answer.parameters for answer in answers}) == 1
            assert len({answer.step for answer in answers}) == 1
    assert_same_run(tmp_path / "parts", tmp_path / "whole")
    progress = read_progress(tmp_path / "whole" / "checkpoint.safetensors")
    assert (progress.step, progress.since_best) == (answers[0].step, 2)
    assert 2 < progress.step < 4 * 7

    # One process goes on with the average of three.
    train(replace(config, early_stop=100, steps=20), tmp_path / "parts", resume=True)
    assert int(load_file(tmp_path / "parts" / "checkpoint.safetensors")["average.n_averaged"]) == 20


@pytest.mark.parametrize(
    "kind",
    [
        {"model": "simcse", "dropout": 0.0},
        {"model": "mixcse", "dropout": 0.0, "learn_scale": True},
        {"model": "gloss-bow"},
        {"model": "gloss-pos", "latents": "all"},
    ],
    ids=str,
)
def test_ranks_train_as_one_process_does_on_their_batches_together(pool, numbered, tmp_path, kind):
    """In random order, the sentences of all ranks in a step are those of one process with a larger batch."""
    config = TrainConfig((numbered,), epochs=2, **SMALL | kind | {"batch_size": 26})
    together(pool, 4, config, tmp_path / "four")
    train(replace(config, batch_size=104), tmp_path / "one")
    assert_near(*(load_file(tmp_path / name / "model.safetensors") for name in ("four", "one")))
    ours, theirs = (
        [line["loss"] for line in metrics_without_times(tmp_path / run)] for run in ("four", "one")
    )
    assert ours == pytest.approx(theirs, rel=1e-5)


def assert_near(ours, theirs):
    """Weights after a few steps of 5e-4, of which only rounding may differ."""
    for name, wanted in theirs.items():
        torch.testing.assert_close(ours[name], wanted, rtol=0, atol=2e-6, msg=name)


@pytest.mark.parametrize("documents", ["cut", "cross"])
@pytest.mark.parametrize("kind", [{}, {"model": "skip-thoughts", "context_size": 1}], ids=str)
def test_ranks_train_on_spans_as_one_process_does_on_separate_texts(
    pool, numbered, tmp_path, documents, kind
):
    config = TrainConfig(
        (numbered,), encoder="gru", hidden_size=4, documents=documents, clip=5, **SMALL | kind
    )
    together(pool, 4, config, tmp_path / "four")
    vocabulary = Vocabulary.load(tmp_path / "four" / "vocabulary.json", unknown=config.unknown)
    one = Trainer(config, [numbered], vocabulary, tmp_path, Progress())
    spans = split([numbered], [Span(Position(), SENTENCES)], 4)
    # 101 sentences, and once 100: the last of a rank's make no batch, and go into the one before.
    sizes = [(20, 20, 20, 20, 21), (20, 20, 20, 20, 21), (20, 20, 20, 20, 21), (20, 20, 20, 20, 20)]
    shares = [span_batches([numbered], vocabulary, own, span) for own, span in zip(sizes, spans, strict=True)]
    losses = []
    for parts in zip(*shares, strict=True):
        batch = [part for part, _ in parts]
        apart = torch.cat([part.document_ids + 1000 * rank for rank, part in enumerate(batch)])
        pieces = torch.cat([torch.full_like(part.lengths, rank) for rank, part in enumerate(batch)])
        tokens, lengths = (
            torch.cat([getattr(part, name) for part in batch]) for name in ("tokens", "lengths")
        )
        losses.append(float(one.step(Batch(tokens, lengths, apart, batch[-1].position, pieces))[0]))
    assert [line["loss"] for line in metrics_without_times(tmp_path / "four")] == pytest.approx(
        losses, rel=1e-5
    )
    assert_near(load_file(tmp_path / "four" / "model.safetensors"), one.model.state_dict())


def test_gradients_are_summed_whatever_rows_a_rank_has(pool):
    answers = pool.run(3, summed_gradients)
    assert [answer.tolist() for answer in answers[0]] == [answer.tolist() for answer in answers[1]]
    table, dense, strided, half = answers[0]
    assert table.tolist() == [[0, 0], [3, 3], [0, 0], [3, 3], [2, 2]]
    assert dense.tolist() == [[0 + 1 + 2], [30 + 3]]
    assert strided.tolist() == [[3.0, 33.0], [63.0, 93.0]]
    assert half.dtype == torch.float64
    assert half.tolist() == [6.0]


def signalled(rank):
    if rank == 2:
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"schedule": "linear", "warmup": 0.5, "precision": "float16"},
        {"chunk": 6, "encoder": "gru", "hidden_size": 4},
    ],
    ids=str,
)
def test_a_signal_to_one_rank_stops_all_at_the_same_step(pool, numbered, tmp_path, options):
    """Also in the middle of a warm-up of 7 steps, with a scaled loss."""
    config = TrainConfig((numbered,), epochs=2, **SMALL | options)
    together(pool, 3, config, tmp_path / "whole")
    answers = together(pool, 3, config, tmp_path / "stopped", False, signalled, 4)
    assert {(answer.step, answer.stopped_by) for answer in answers} == {(4, signal.SIGTERM)}
    assert read_progress(tmp_path / "stopped" / "checkpoint.safetensors").step == 4
    together(pool, 3, config, tmp_path / "stopped", True)
    assert_same_run(tmp_path / "stopped", tmp_path / "whole")


def test_rank_0_alone_shows_the_progress_and_writes(pool, numbered, tmp_path):
    config = TrainConfig((numbered,), valid=numbered, valid_batches=1, **SMALL)
    answers = together(pool, 3, config, tmp_path / "run")
    assert [answer.shown for answer in answers] == [8, 0, 0]
    assert [answer.rank for answer in answers] == [0, 1, 2]
    lines = metrics_without_times(tmp_path / "run")
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert "validation_loss" in lines[-1]


def errors_of(pool, *arguments):
    """The errors of three ranks, and the seconds that they took to end."""
    began = time.monotonic()
    answers = pool.run(3, trained, *arguments)
    return answers, time.monotonic() - began


def test_ranks_with_different_settings_are_refused(pool, numbered, tmp_path):
    config = TrainConfig((numbered,), **SMALL)
    answers, _ = errors_of(pool, [config, config, replace(config, batch_size=30)], tmp_path / "run")
    assert type(answers[2]) is InputError
    assert str(answers[2]) == "batch_size: want 20 as on rank 0, got 30"
    for answer in answers[:2]:
        assert isinstance(answer, OtherRankError)
        assert str(answer) == "rank 2 has failed: batch_size: want 20 as on rank 0, got 30"
    assert not (tmp_path / "run" / "config.json").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"corpus": ("absent.txt",)}, r"cannot read absent\.txt"),
        (
            {"batch_size": 135},
            "shorter than a batch on each of 3 processes: 403 sentences in .*, batch size 135",
        ),
    ],
)
def test_what_rank_0_finds_wrong_is_told_once(pool, numbered, tmp_path, change, words):
    config = replace(TrainConfig((numbered,), **SMALL), **change)
    answers, _ = errors_of(pool, config, tmp_path / "run")
    with pytest.raises(InputError, match=words):
        raise answers[0]
    assert [answer.is_told for answer in answers[1:]] == [True, True]
    assert str(answers[1]) == str(answers[2]) == f"rank 0 has failed: {answers[0]}"


THREADS = """
import os, sys
from pathlib import Path
from fastqt.sentences.cli import main

assert main(sys.argv[1:]) == 0
names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
Path(__file__).with_name("threads of rank " + os.environ["RANK"]).write_text(" ".join(names))
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/task").is_dir(), reason="this system does not list a process's threads"
)
def test_no_thread_of_the_process_group_outlives_a_training(numbered, tmp_path):
    """One that releases a tensor while Python ends would abort the process."""
    script, out = tmp_path / "threads.py", tmp_path / "run"
    script.write_text(THREADS)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = ["--out", out, "--batch-size", "20", "--word-dim", "6", "--profile", tmp_path / "trace.json"]
    subprocess.run(
        [*map(str, (*launch, script, "train", numbered, *options))],
        capture_output=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=True,
    )
    for rank in range(2):  # each writes a file: lines that both print at once may be joined
        names = (tmp_path / f"threads of rank {rank}").read_text()
        assert names
        assert "gloo" not in names
