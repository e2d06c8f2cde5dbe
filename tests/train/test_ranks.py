"""Several processes train one model: what they read, what they agree on, and what becomes of a failure."""

import os
import signal
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

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
STAND_IN = True


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


def trained(config, out, resume=False):
    """Trains, and returns the step, the stop signal, each batch's first words' ids, and the generator's state."""
    stand_in()
    taken = []
    step = loop.Trainer.step

    def noting(self, batch, sizes):
        words = self.vocabulary.tokenizer
        taken.extend(words.id_to_token(int(token)) for token in batch.tokens[:, 0])
        return step(self, batch, sizes)

    loop.Trainer.step = noting
    began = torch.get_rng_state()
    try:
        outcome = train(config, out, resume=resume)
    finally:
        loop.Trainer.step = step
    return outcome.step, outcome.stopped_by, taken, torch.get_rng_state(), began


@pytest.fixture
def numbered(tmp_path):
    """A text of 403 sentences in documents of 1 to 9, each of which begins with a word of its own."""
    lines = []
    for number in range(403):
        lines.append(f"s{number} word{number % 7} word{number % 5}")
        if number % 9 in (0, 4):
            lines.append("")
    path = tmp_path / "numbered.txt"
    path.write_text("\n".join(lines))
    return str(path)


@pytest.mark.parametrize("model", ["quickthoughts", "simcse"])
def test_every_sentence_has_its_turn_once_an_epoch_on_4_then_2_then_3_ranks(pool, numbered, tmp_path, model):
    config = TrainConfig((numbered,), model=model, epochs=2, **SMALL)
    everything = []
    for ranks, steps in ((4, 2), (2, 5), (3, None)):
        settings = replace(config, steps=steps)
        answers = pool.run(ranks, trained, settings, tmp_path / "run", True)
        print([a if isinstance(a, BaseException) else a[0] for a in answers])
        everything += [word for answer in answers for word in answer[2]]
    assert Counter(everything) == {f"s{number}": 2 for number in range(403)}
