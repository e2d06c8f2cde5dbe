"""Gradients of a batch in chunks are those of the whole, on ranks too, in the memory of a chunk."""

import os
import random
import subprocess
import sys

import pytest
import torch

from fastqt.sentences.runs.config import TrainConfig
from tests.shared.pairs_of_texts import write_rows, write_teacher
from tests.shared.tolerances import relative
from tests.shared.trained_on_ranks import chunked_gradients

SMALL = {"word_dim": 6, "hidden_size": 4, "batch_size": 50, "context_size": 1, "report_every": 1}
SMALL |= {"layers": 1, "heads": 2, "feedforward": 8, "dropout": 0.0}


KINDS = [
    {"context_size": 2},
    {"encoder": "combine"},
    {"model": "simcse", "encoder": "transformer"},
    {"model": "mixcse", "encoder": "gru", "form": "released", "partner": "random"},
]


def assert_equal(in_chunks, at_once):
    """The sums of chunks differ from those of a batch by roundings of float64 alone."""
    assert len(in_chunks) == len(at_once) > 3
    for ours, theirs in zip(in_chunks, at_once, strict=True):
        assert ours.dtype == theirs.dtype
        assert relative(ours.double(), theirs.double()) < 1e-12


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_gradients_in_chunks_are_those_of_the_whole_batch(planted, kind):
    assert_equal(*chunked_gradients(TrainConfig((planted[0],), chunk=7, **SMALL | kind)))


@pytest.mark.parametrize(
    "settings",
    [
        {"model": "simcse", "encoder": "gru"},
        {"model": "pairs", "teacher_weight": 0.5},
        {"model": "pairs", "loss": "gist", "teacher_weight": 0.5},
    ],
    ids=str,
)
def test_gradients_of_rows_in_chunks_are_those_of_the_whole_batch(tmp_path, settings):
    rows = write_rows(tmp_path / "rows.tsv", 120, 3)
    if settings["model"] == "pairs":
        settings = settings | {"teacher": write_teacher(tmp_path, 120, 3)[0], "clip": 0.0}
    assert_equal(*chunked_gradients(TrainConfig((rows,), chunk=7, **SMALL | settings)))


@pytest.mark.parametrize("kind", KINDS[1:], ids=str)
def test_gradients_of_two_ranks_are_those_of_their_whole_batches(pool, planted, kind):
    config = TrainConfig((planted[0],), chunk=7, **SMALL | kind)
    answers = pool.run(2, chunked_gradients, config)
    for answer in answers:
        assert isinstance(answer, list), answers
        assert_equal(*answer)
    assert all(map(torch.equal, answers[0][0][:4], answers[1][0][:4])), "the sums differ between the ranks"


# Prints by how many bytes the process grows in a step of `batch` sentences in chunks of 64.
GROWTH = """
import sys
from pathlib import Path
import numpy as np
import torch
from fastqt.sentences.runs.config import TrainConfig
from fastqt.machine.memory import growth_of_process
from fastqt.sentences.train.loop import Trainer
from fastqt.sentences.train.objectives import Training
from fastqt.sentences.train.preparation import read_corpus

corpus, batch = sys.argv[1], int(sys.argv[2])
config = TrainConfig((corpus,), model="simcse", encoder="transformer", layers=2, word_dim=128, heads=4,
                     feedforward=512, batch_size=batch, chunk=64, device="cpu")
vocabulary, progress = read_corpus(config, [corpus], 1)
trainer = Trainer(Training(config, [corpus], vocabulary, Path(), progress))
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

    # A run may have a few MiB more, of what malloc keeps; a batch at once would take many times as much.
    small, large = growth(64), min(growth(4096) for _ in range(3))
    embeddings = 2 * 4096 * 128 * 4  # of two views of each sentence
    assert large < 1.3 * small + embeddings, [round(x / 2**20, 1) for x in (small, large, embeddings)]
