"""A rank that dies, raises, hangs or is slow ends all others, with words that name it."""

import os
import signal
import time
from dataclasses import replace

import pytest

from fastqt.sentences.errors import OtherRankError
from fastqt.sentences.runs.checkpoint import read_progress
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.train import train
from tests.shared.rank_pool import DIED, Pool
from tests.shared.trained_on_ranks import trained

TIMEOUT = 6
SETTINGS = {"word_dim": 4, "batch_size": 40, "context_size": 1, "report_every": 1, "checkpoint_every": 2}
SETTINGS |= {"valid_every": 2, "valid_batches": 1}


@pytest.fixture
def pool():
    """A new one for each case, most of which end processes."""
    pool = Pool(3)
    yield pool
    pool.close()


def killed(rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def first_killed(rank):
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)


def frozen(rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


def raising(rank):
    if rank == 1:
        raise ZeroDivisionError("for a test")


def first_raising(rank):
    if rank == 0:
        raise RuntimeError("for a test")


def slow(rank):
    if rank == 1:
        time.sleep(TIMEOUT + 16)  # The others look for who is behind, which takes them nine seconds.


def long(rank):
    if rank == 0:
        time.sleep(TIMEOUT + 2)


PROCESS = r"\(process \d+ on host \S+\)"


@pytest.mark.parametrize(
    ("spoil", "place", "failed", "words"),
    [
        pytest.param(killed, "step", 1, rf"^rank 1 {PROCESS} has died or hangs$", marks=pytest.mark.slow),
        (raising, "step", 1, "^rank 1 has failed: ZeroDivisionError: for a test$"),
        pytest.param(killed, "validate", 1, rf"^rank 1 {PROCESS} has died", marks=pytest.mark.slow),
        pytest.param(killed, "save", 1, rf"^rank 1 {PROCESS} has died or", marks=pytest.mark.slow),
        pytest.param(first_killed, "step", 0, rf"^rank 0 {PROCESS} has died", marks=pytest.mark.slow),
        pytest.param(first_killed, "work", 0, rf"^rank 0 {PROCESS} ", marks=pytest.mark.slow),
        pytest.param(
            first_raising, "work", 0, "^rank 0 has failed: RuntimeError: for", marks=pytest.mark.slow
        ),
        pytest.param(
            frozen, "step", 1, rf"^rank 1 {PROCESS} (has died|gave no sign)", marks=pytest.mark.slow
        ),
        pytest.param(
            slow, "step", 1, rf"^rank 1 {PROCESS} did not answer within 6 s", marks=pytest.mark.slow
        ),
    ],
)
def test_a_rank_that_fails_ends_the_others_with_words(planted, tmp_path, pool, spoil, place, failed, words):
    config = TrainConfig((planted[0],), valid=planted[1], **SETTINGS, timeout=TIMEOUT, keep_checkpoint=True)
    run = tmp_path / "run"
    answers = pool.run(3, trained, config, run, False, spoil, 2, place)
    others = [answer for rank, answer in enumerate(answers) if rank != failed]
    for answer in others:
        with pytest.raises(OtherRankError, match=words):
            raise answer
    # The user reads it once: from rank 0, or from the rank itself.
    assert not all(answer.is_told for answer in others) or answers[failed] != DIED
    train(replace(config, valid=None), run, resume=True)
    assert read_progress(run / "checkpoint.safetensors").taken == 480


@pytest.mark.slow
def test_no_timeout_goes_off_while_rank_0_works(planted, tmp_path, pool):
    config = TrainConfig((planted[0],), valid=planted[1], **SETTINGS, timeout=TIMEOUT)
    answers = pool.run(3, trained, config, tmp_path, False, long, 2, "work")
    assert [getattr(answer, "step", answer) for answer in answers] == [4, 4, 4]
