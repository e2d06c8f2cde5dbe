"""A batch that the encoders run in chunks has the gradients of the whole batch, in the memory of a chunk."""

import json
import os
import random
import signal
import subprocess
import sys

import pytest
import torch

from fastqt.errors import InputError
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.train import train
from tests.sentences.train.test_resume import Signalling, assert_same_run
from tests.shared.rank_pool import Pool
from tests.shared.tolerances import relative
from tests.shared.trained_on_ranks import chunked_gradients

SMALL = {"word_dim": 6, "hidden_size": 4, "batch_size": 50, "context_size": 2, "report_every": 1}
SMALL |= {"layers": 1, "heads": 2, "feedforward": 8, "dropout": 0.0}

KINDS = [
    {},
    {"encoder": "combine"},
    {"model": "simcse", "encoder": "transformer"},
    {"model": "mixcse", "encoder": "gru", "form": "released", "partner": "random"},
]


@pytest.fixture(scope="module")
def pool():
    pool = Pool(2)
    yield pool
    pool.close()


@pytest.fixture
def triplets(tmp_path):
    """Rows of an anchor, a positive and a hard negative."""
    path = tmp_path / "rows.tsv"
    draw = random.Random(0)
    rows = ["\t".join(" ".join(draw.choices("abcdefgh", k=4)) for _ in range(3)) for _ in range(120)]
    path.write_text("\n".join(rows))
    return str(path)


def assert_equal(in_chunks, at_once):
    """The sums of chunks differ from those of a batch by roundings of float64 alone."""
    assert len(in_chunks) == len(at_once) > 3
    for ours, theirs in zip(in_chunks, at_once, strict=True):
        assert ours.dtype == theirs.dtype
        assert relative(ours.double(), theirs.double()) < 1e-12


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_gradients_are_those_of_the_whole_batch(planted, kind):
    assert_equal(*chunked_gradients(TrainConfig((planted[0],), chunk=7, **SMALL | kind)))


def test_gradients_of_triplets_are_those_of_the_whole_batch(triplets):
    kind = {"model": "simcse", "encoder": "gru"}
    assert_equal(*chunked_gradients(TrainConfig((triplets,), chunk=7, **SMALL | kind)))


@pytest.mark.parametrize("kind", KINDS[1:], ids=str)
def test_gradients_of_two_ranks_are_those_of_their_whole_batches(pool, planted, kind):
    config = TrainConfig((planted[0],), chunk=7, **SMALL | kind)
    answers = pool.run(2, chunked_gradients, config)
    for answer in answers:
        assert isinstance(answer, list), answers
        assert_equal(*answer)
    assert all(map(torch.equal, answers[0][0][:4], answers[1][0][:4])), "the sums differ between the ranks"


def test_a_training_in_float32_in_chunks_is_that_of_whole_batches(planted, tmp_path):
    losses = []
    for chunk in (7, None):
        config = TrainConfig((planted[0],), encoder="gru", chunk=chunk, **SMALL)
        train(config, tmp_path / str(chunk))
        lines = (tmp_path / str(chunk) / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in lines])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


class Early(Signalling):
    AT = 4


def test_a_resumed_training_in_chunks_has_the_bits_of_a_whole_one(planted, tmp_path):
    options = {"model": "simcse", "encoder": "transformer", "dropout": 0.2, "precision": "float16"}
    config = TrainConfig((planted[0],), chunk=16, keep_checkpoint=True, **SMALL | options)
    train(config, tmp_path / "whole")
    assert train(config, tmp_path / "parts", display=Early).stopped_by == signal.SIGTERM
    train(config, tmp_path / "parts", resume=True)
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"chunk": 0}, "chunk: want at least 1, got 0"),
        ({"chunk": 8, "model": "skip-thoughts"}, "chunk: want none with model skip-thoughts, .*; got 8"),
        ({"chunk": 8, "model": "gloss-bow"}, "chunk: want none with model gloss-bow, .*; got 8"),
        (
            {"chunk": 8, "model": "simcse", "encoder": "transformer", "masked_words": 0.1},
            "chunk: want none with masked_words, .* got 8",
        ),
    ],
    ids=str,
)
def test_what_has_no_chunks_is_refused(settings, message):
    with pytest.raises(InputError, match=message):
        TrainConfig(("x",), **settings)


# Prints by how many bytes the process grows in a step of `batch` sentences in chunks of 64.
GROWTH = """
import sys
from pathlib import Path
import numpy as np
import torch
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.tools.memory import growth_of_process
from fastqt.sentences.train.loop import Trainer
from fastqt.sentences.train.preparation import read_corpus

corpus, batch = sys.argv[1], int(sys.argv[2])
config = TrainConfig((corpus,), model="simcse", encoder="transformer", layers=2, word_dim=128, heads=4,
                     feedforward=512, batch_size=batch, chunk=64, device="cpu")
vocabulary, progress = read_corpus(config, [corpus], 1)
trainer = Trainer(config, [corpus], vocabulary, Path(), progress)
turn = next(iter(trainer.objective.turns(progress)))
small = trainer.objective.sentences.sample(np.arange(4))
trainer.step(small)  # allocates the state of the optimiser
print(growth_of_process(lambda: trainer.step(turn.batch))[1])
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems do not report the memory")
def test_a_large_batch_in_chunks_needs_the_memory_of_a_small_one_and_of_its_embeddings(tmp_path):
    draw = random.Random(0)
    words = [f"w{number}" for number in range(500)]
    corpus = tmp_path / "text.txt"
    corpus.write_text("\n".join(" ".join(draw.choices(words, k=16)) for _ in range(4096)))

    def growth(batch):
        # With a mapping for each tensor, memory that is freed goes back, and malloc keeps nothing of it.
        program = [sys.executable, "-c", GROWTH, str(corpus), str(batch)]
        environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "262144"}
        done = subprocess.run(program, capture_output=True, text=True, check=True, env=environment)
        return int(done.stdout)

    small, large = growth(64), growth(4096)
    embeddings = 2 * 4096 * 128 * 4  # of two views of each sentence
    assert large < 1.3 * small + embeddings, [round(x / 2**20, 1) for x in (small, large, embeddings)]
