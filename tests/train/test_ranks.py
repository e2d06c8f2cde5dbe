"""Several processes train one model: what they read, what they agree on, and what becomes of a failure."""

import os
import signal
import time
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from rank_pool import DIED, Pool
from safetensors.torch import load_file

from fastqt.errors import InputError
from fastqt.runs.checkpoint import read_progress
from fastqt.runs.config import TrainConfig
from fastqt.train import loop, train
from fastqt.train.progress import Display
from tests.train.test_resume import assert_same_run, metrics_without_times

SMALL = {"word_dim": 6, "batch_size": 20, "context_size": 2, "report_every": 1, "timeout": 60}
SENTENCES = 403


@pytest.fixture(scope="module")
def pool():
    pool = Pool(4)
    yield pool
    pool.close()


def stand_in():
    import sys
    import types

    import torch.distributed as dist

    from fastqt.train import objectives

    try:
        import fastqt.distributed  # noqa: F401
    except ImportError:

        class Group:
            def __init__(self, **options):
                self.options = options

        module = types.ModuleType("fastqt.distributed")
        module.Group = Group
        sys.modules["fastqt.distributed"] = module
        from fastqt.losses import simcse_loss
        from fastqt.nn import SimCSELoss, MixCSELoss
        from fastqt.functional import contrastive_loss
        from fastqt.losses import mixcse_loss

        def wrap(function):
            def call(a, b, *rest, group=None, **options):
                loss = function(a, b, *rest, **options)
                if group is None:
                    return loss
                n = torch.tensor(float(len(a)))
                dist.all_reduce(n)
                part = loss * len(a) / n
                total = part.detach().clone()
                dist.all_reduce(total)
                return part + (total - part.detach())

            return call

        objectives.contrastive_loss = wrap(contrastive_loss)
        SimCSELoss.function = staticmethod(wrap(simcse_loss))
        MixCSELoss.function = staticmethod(wrap(mixcse_loss))


def trained(config, out, resume=False, display=Display, spoil=None, at=0):
    """Trains, and tells what a rank has seen.

    Args:
        config, out, resume, display: as in `train`.
        spoil: called with the rank in step number `at` of this call.

    Returns:
        The outcome; the first word and the document of each sentence of each batch; the state of the random
        generator at the first step; the parameters at the end.
    """
    stand_in()
    batches, states, last = [], [], []
    step = loop.Trainer.step

    def noting(self, batch, sizes):
        if not batches:
            states.append(torch.get_rng_state())
        words = [self.vocabulary.tokenizer.id_to_token(int(token)) for token in batch.tokens[:, 0]]
        documents = getattr(batch, "document_ids", batch.lengths)
        batches.append(list(zip(words, documents.tolist(), strict=True)))
        if spoil is not None and len(batches) == at:
            spoil(self.ranks.rank)
        result = step(self, batch, sizes)
        last[:] = [parameter.detach().clone() for parameter in self.parameters]
        return result

    loop.Trainer.step = noting
    try:
        outcome = train(config, out, resume=resume, display=display)
    finally:
        loop.Trainer.step = step
    return outcome, batches, states, last


@pytest.fixture
def numbered(tmp_path):
    """A text of 403 sentences in documents of 1 to 9, each of which begins with a word of its own."""
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
        settings = replace(config, steps=steps)
        answers = together(pool, ranks, settings, tmp_path / "run", True)
        assert len({answer[0].step for answer in answers}) == 1
        assert len({len(answer[1]) for answer in answers}) == 1
        for _, batches, _, _ in answers:
            seen.update(word for batch in batches for word, _ in batch)
            for batch in batches if "model" not in options else ():
                assert_neighbours(batch, options)
    assert seen == {f"s{number}": 2 for number in range(SENTENCES)}


def assert_neighbours(batch, options):
    """Sentences of one document that follow each other in a batch do so in the text."""
    numbers = [int(word[1:]) for word, _ in batch]
    for (one, other), (number, after) in zip(pairwise(batch), pairwise(numbers), strict=True):
        if one[1] == other[1]:
            assert after == number + 1


def test_ranks_have_equal_bits_and_a_resumed_training_has_those_of_a_whole_one(pool, numbered, tmp_path):
    for kind in ({"encoder": "bow"}, {"model": "simcse", "encoder": "bow", "dropout": 0.2}):
        config = TrainConfig((numbered,), valid=numbered, valid_every=1, epochs=2, **SMALL | kind)
        for name, pauses in (("whole", (None,)), ("parts", (3, 6, None))):
            run = tmp_path / f"{len(kind)}{name}"
            for steps in pauses:
                answers = together(pool, 3, replace(config, steps=steps), run, True)
                first = answers[0][3]
                assert len(first) == len(answers[1][3]) > 0
                assert all(
                    torch.equal(*pair) for answer in answers for pair in zip(answer[3], first, strict=True)
                )
                states = {bytes(state.tolist()) for answer in answers for state in answer[2]}
                assert len(states) == 3, "dropout would be the same on two ranks"
        assert_same_run(tmp_path / f"{len(kind)}parts", tmp_path / f"{len(kind)}whole")


@pytest.mark.parametrize(
    "kind",
    [
        {"model": "simcse", "dropout": 0.0},
        {"model": "mixcse", "dropout": 0.0},
        {"model": "gloss-bow"},
        {"model": "gloss-pos", "latents": "all"},
    ],
    ids=str,
)
def test_ranks_train_as_one_process_does_on_their_batches_together(pool, numbered, tmp_path, kind):
    """With sentences in random order, the ranks' batches together are those of one process."""
    config = TrainConfig((numbered,), epochs=2, **SMALL | kind | {"batch_size": 26})
    together(pool, 4, config, tmp_path / "four")
    train(replace(config, batch_size=104), tmp_path / "one")
    four, one = (load_file(tmp_path / name / "model.safetensors") for name in ("four", "one"))
    for name, wanted in one.items():
        torch.testing.assert_close(four[name], wanted, rtol=0, atol=2e-5, msg=name)
    losses = [[line["loss"] for line in metrics_without_times(tmp_path / run)] for run in ("four", "one")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def signalled(rank):
    if rank == 2:
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_to_one_rank_stops_all_at_the_same_step(pool, numbered, tmp_path):
    config = TrainConfig((numbered,), epochs=2, **SMALL)
    together(pool, 3, config, tmp_path / "whole")
    answers = together(pool, 3, config, tmp_path / "stopped", False, Display, signalled, 4)
    assert {(answer[0].step, answer[0].stopped_by) for answer in answers} == {(4, signal.SIGTERM)}
    assert read_progress(tmp_path / "stopped" / "checkpoint.safetensors").step == 4
    together(pool, 3, config, tmp_path / "stopped", True)
    assert_same_run(tmp_path / "stopped", tmp_path / "whole")


def killed(rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def first_killed(rank):
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)


def late(rank):
    if rank == 1:
        time.sleep(12)


def stopped(rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


def raising(rank):
    if rank == 1:
        raise ZeroDivisionError("for a test")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (killed, "rank 1 has died or hangs"),
        (first_killed, "rank 0 has died or hangs"),
        (raising, "rank 1 has failed: ZeroDivisionError: for a test"),
        (late, "rank 1 did not answer within 5 s"),
    ],
)
def test_a_rank_that_fails_ends_the_others_with_words(pool, numbered, tmp_path, spoil, words):
    config = TrainConfig((numbered,), **SMALL | {"timeout": 5})
    began = time.monotonic()
    answers = pool.run(3, trained, config, tmp_path / "run", False, Display, spoil, 3)
    print(answers, time.monotonic() - began)
