"""Several processes train one model: what they read, compute and save, and when they stop or fail."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from functools import partial
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
from fastqt.sentences.train.objectives import Training
from tests.shared.rank_pool import DIED, Pool
from tests.shared.trained_on_ranks import summed_gradients, trained
from tests.shared.trainings import assert_same_run, lines_of, on_ranks

SENTENCES = 403
SMALL = {"keep_checkpoint": True, "word_dim": 6, "batch_size": 20}


def small(kind):
    """The settings of a small training, and those of a model kind; quickthoughts predicts two neighbours."""
    return SMALL | ({} if "model" in kind else {"context_size": 2}) | kind


SMALL |= {"report_every": 1, "timeout": 60}


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


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({}, ((4, 2), (2, 5), (3, None))),
        ({"documents": "cross"}, ((4, 2), (2, 5), (3, None))),
        ({"model": "simcse"}, ((4, 2), (2, 5), (3, None))),
        ({}, ((3, 2), (1, 9), (2, None))),
    ],
    ids=str,
)
def test_other_numbers_of_ranks_take_every_sentence_once_an_epoch(pool, numbered, tmp_path, options, parts):
    config = TrainConfig((numbered,), epochs=2, **small(options))
    seen = Counter()
    for ranks, steps in parts:
        answers = on_ranks(pool, ranks, replace(config, steps=steps), tmp_path / "run", True)
        assert len({(answer.step, len(answer.batches)) for answer in answers}) == 1
        for batch in (batch for answer in answers for batch in answer.batches):
            seen.update(word for word, _ in batch)
            numbers = [int(word[1:]) for word, _ in batch]
            # Sentences that a window joins in a batch follow each other in the text.
            for (one, other), (number, after) in zip(pairwise(batch), pairwise(numbers), strict=True):
                assert after == number + 1 or one[1] != other[1] or "model" in options
    assert seen == {f"s{number}": 2 for number in range(SENTENCES)}


@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"model": "simcse", "dropout": 0.2},
        {"model": "skip-thoughts", "hidden_size": 4},
        pytest.param({"model": "gloss-bow"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_ranks_have_equal_bits_and_resumed_ones_those_of_a_whole_training(pool, numbered, tmp_path, kind):
    settings = small(kind) | {"valid_every": 1, "valid_batches": 1, "epochs": 2}
    config = TrainConfig((numbered,), valid=numbered, **settings)
    for name, pauses in (("whole", (None,)), ("parts", (3, 6, None))):
        for steps in pauses:
            answers = on_ranks(pool, 3, replace(config, steps=steps), tmp_path / name, True)
            assert len({answer.parameters for answer in answers}) == 1
            assert len({answer.generator for answer in answers}) == 3, "the same dropout on two ranks"
            assert [(answer.rank, answer.shown > 0) for answer in answers] == [
                (0, True),
                (1, False),
                (2, False),
            ]
    assert_same_run(tmp_path / "parts", tmp_path / "whole")
    assert len(read_generators(tmp_path / "whole" / "checkpoint.safetensors")) == 3


def test_ranks_stop_early_at_the_same_step_also_when_resumed(pool, numbered, tmp_path):
    """Rank 0 tells the others when its figures no longer improve."""
    config = TrainConfig((numbered,), valid=numbered, valid_every=1, valid_batches=1, epochs=4, **small({}))
    config = replace(config, early_stop=2, learning_rate=0.5)
    for name, pauses in (("whole", (None,)), ("parts", (2, None))):
        for steps in pauses:
            answers = on_ranks(pool, 3, replace(config, steps=steps), tmp_path / name, True)
            assert len({answer.parameters for answer in answers}) == 1
            assert len({answer.step for answer in answers}) == 1
    assert_same_run(tmp_path / "parts", tmp_path / "whole")
    progress = read_progress(tmp_path / "whole" / "checkpoint.safetensors")
    assert (progress.step, progress.since_best) == (answers[0].step, 2)
    assert 2 < progress.step < 4 * 7


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
    config = TrainConfig((numbered,), epochs=2, **small(kind) | {"batch_size": 26})
    on_ranks(pool, 4, config, tmp_path / "four")
    train(replace(config, batch_size=104), tmp_path / "one")
    assert_near(*(load_file(tmp_path / name / "model.safetensors") for name in ("four", "one")))
    ours, theirs = ([line["loss"] for line in lines_of(tmp_path / run)] for run in ("four", "one"))
    assert ours == pytest.approx(theirs, rel=1e-5)


def assert_near(ours, theirs):
    """Weights after a few steps of 5e-4, of which only rounding may differ."""
    for name, wanted in theirs.items():
        torch.testing.assert_close(ours[name], wanted, rtol=0, atol=2e-6, msg=name)


@pytest.mark.parametrize("documents", ["cut", "cross"])
@pytest.mark.parametrize("kind", [{}, {"model": "skip-thoughts"}], ids=str)
def test_ranks_train_on_spans_as_one_does_on_separate_texts(pool, numbered, tmp_path, documents, kind):
    settings = small(kind) | {"encoder": "gru", "hidden_size": 4, "documents": documents, "clip": 5}
    config = TrainConfig((numbered,), **settings)
    on_ranks(pool, 4, config, tmp_path / "four")
    vocabulary = Vocabulary.load(tmp_path / "four" / "vocabulary.json", unknown=config.unknown)
    one = Trainer(Training(config, [numbered], vocabulary, tmp_path, Progress()))
    spans = split([numbered], [Span(Position(), SENTENCES)], 4)
    # 101 sentences, and once 100: the last of a rank's make no batch, and go into the one before.
    sizes = [(20, 20, 20, 20, 21), (20, 20, 20, 20, 21), (20, 20, 20, 20, 21), (20, 20, 20, 20, 20)]
    shares = [span_batches([numbered], vocabulary, own, span) for own, span in zip(sizes, spans, strict=True)]
    losses = []
    for parts in zip(*shares, strict=True):
        batch = [part for part, _ in parts]
        apart = torch.cat([part.document_ids + 1000 * rank for rank, part in enumerate(batch)])
        pieces = torch.cat([torch.full_like(part.lengths, rank) for rank, part in enumerate(batch)])
        tokens = torch.cat([part.tokens for part in batch])
        lengths = torch.cat([part.lengths for part in batch])
        losses.append(float(one.step(Batch(tokens, lengths, apart, pieces))[0]))
    assert [line["loss"] for line in lines_of(tmp_path / "four")] == pytest.approx(losses, rel=1e-5)
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


def at_rank(number, act, rank):
    """Has the rank of this number act in a step."""
    if rank == number:
        act()


def send(number):
    os.kill(os.getpid(), number)


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
    config = TrainConfig((numbered,), epochs=2, **small(options))
    on_ranks(pool, 3, config, tmp_path / "whole")
    spoil = partial(at_rank, 2, partial(send, signal.SIGTERM))
    answers = on_ranks(pool, 3, config, tmp_path / "stopped", False, spoil, 4)
    assert {(answer.step, answer.stopped_by) for answer in answers} == {(4, signal.SIGTERM)}
    assert read_progress(tmp_path / "stopped" / "checkpoint.safetensors").step == 4
    on_ranks(pool, 3, config, tmp_path / "stopped", True)
    assert_same_run(tmp_path / "stopped", tmp_path / "whole")


def test_ranks_with_different_settings_are_refused(pool, numbered, tmp_path):
    config = TrainConfig((numbered,), **SMALL)
    answers = pool.run(3, trained, [config, config, replace(config, batch_size=30)], tmp_path / "run")
    assert type(answers[2]) is InputError
    assert str(answers[2]) == "batch_size: want 20 as on rank 0, got 30"
    for answer in answers[:2]:
        assert isinstance(answer, OtherRankError)
        assert str(answer).endswith("rank 2 raised InputError: batch_size: want 20 as on rank 0, got 30")
    assert not (tmp_path / "run" / "config.json").exists()


def test_what_rank_0_finds_wrong_is_told_once(pool, numbered, tmp_path):
    config = TrainConfig((numbered,), **SMALL)
    for change, words in (
        ({"corpus": ("absent.txt",)}, r"cannot read absent\.txt"),
        ({"batch_size": 135}, "shorter than a batch on each of 3 processes: 403 sentences in .*, batch size"),
    ):
        answers = pool.run(3, trained, replace(config, **change), tmp_path / "run")
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
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="the system does not list threads")
def test_no_thread_of_the_process_group_outlives_a_training(numbered, tmp_path):
    """One that releases a tensor while Python ends would abort the process."""
    script, out = tmp_path / "threads.py", tmp_path / "run"
    script.write_text(THREADS)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = ["--out", out, "--batch-size", "20", "--word-dim", "6"]
    command = [*launch, script, "train", numbered, *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*map(str, command)], capture_output=True, env=environment, check=True)
    for rank in range(2):  # each writes a file: lines that both print at once may be joined
        names = (tmp_path / f"threads of rank {rank}").read_text()
        assert names
        assert "gloo" not in names


TIMEOUT = 6
WATCHED = {"word_dim": 4, "batch_size": 40, "context_size": 1, "report_every": 1, "checkpoint_every": 2}
WATCHED |= {"valid_every": 2, "valid_batches": 1, "timeout": TIMEOUT}
GONE = "1 did not take part and left no word of why: ended, hung or late$"


@pytest.fixture
def own_pool():
    """A new one for each case, most of which end processes."""
    pool = Pool(3)
    yield pool
    pool.close()


def fail(kind, words):
    raise kind(words)


ACTS = {
    "killed": partial(send, signal.SIGKILL),
    "frozen": partial(send, signal.SIGSTOP),
    "raising": partial(fail, ZeroDivisionError, "for a test"),
    "slow": partial(time.sleep, TIMEOUT + 16),  # the others look for who is behind, for nine seconds
}


@pytest.mark.parametrize(
    ("act", "failed", "place", "words"),
    [
        ("raising", 1, "step", "rank 1 raised ZeroDivisionError: for a test$"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                *(("killed", 1, place, f"rank {GONE}") for place in ("step", "validate", "save")),
                ("killed", 0, "step", "rank 0 did not take part"),
                ("raising", 0, "work", "^rank 0 has failed: ZeroDivisionError: for"),
                ("frozen", 1, "step", f"rank {GONE}"),
                ("slow", 1, "step", f"rank {GONE}"),
            )
        ),
    ],
)
def test_a_rank_that_fails_ends_the_others_with_words(planted, tmp_path, own_pool, act, failed, place, words):
    config = TrainConfig((planted[0],), valid=planted[1], **WATCHED, keep_checkpoint=True)
    run = tmp_path / "run"
    answers = own_pool.run(3, trained, config, run, False, partial(at_rank, failed, ACTS[act]), 2, place)
    others = [answer for rank, answer in enumerate(answers) if rank != failed]
    for answer in others:
        with pytest.raises(OtherRankError, match=words):
            raise answer
    # The user reads it: from another rank, or from the rank itself.
    assert not all(answer.is_told for answer in others) or answers[failed] != DIED
    train(replace(config, valid=None), run, resume=True)
    assert read_progress(run / "checkpoint.safetensors").taken == 480


@pytest.mark.slow
def test_no_timeout_goes_off_while_rank_0_works(planted, tmp_path, own_pool):
    config = TrainConfig((planted[0],), valid=planted[1], **WATCHED)
    spoil = partial(at_rank, 0, partial(time.sleep, TIMEOUT + 2))
    answers = own_pool.run(3, trained, config, tmp_path, False, spoil, 2, "work")
    assert [getattr(answer, "step", answer) for answer in answers] == [4, 4, 4]
