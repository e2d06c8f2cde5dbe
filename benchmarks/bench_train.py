"""Training steps in sentences a second: fastqt's trainer beside the plain loop, in turns on the same batches.

The text is the corpus of novels beside the repository, or random words where that is absent.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
import torch

from benchmarks.measure.baselines import PlainQuickThoughts, PlainTrainer
from benchmarks.measure.timing import in_turns_with
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.runs.progress import Progress
from fastqt.sentences.text import Vocabulary, batches, read_blocks
from fastqt.sentences.train.loop import Trainer
from fastqt.sentences.train.objectives import Training

NOVELS = Path(__file__).parents[2] / "shared" / "data" / "corpus" / "train.txt.xz"
BATCHES = 4
ROUNDS = {"bow": 20, "gru": 3}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> str:
    if NOVELS.exists():
        return str(NOVELS)
    generator = random.Random(0)
    words = [f"word{number}" for number in range(60_000)]
    weights = list(itertools.accumulate(1 / (rank + 10) for rank in range(len(words))))  # Zipf's law
    path = tmp_path_factory.mktemp("corpus") / "made_up.txt"
    with path.open("w") as file:
        for _ in range(60_000):
            length = 1 + int(generator.expovariate(1 / 19))
            file.write(" ".join(generator.choices(words, cum_weights=weights, k=length)) + "\n")
    return str(path)


@pytest.fixture(scope="module")
def vocabulary(corpus) -> Vocabulary:
    return Vocabulary.build(sentence for block in read_blocks([corpus]) for sentence in block.sentences)


@pytest.mark.parametrize(("encoder", "hidden_size"), [("bow", None), ("gru", 300), ("gru", 1000)])
def test_training_step(benchmark, corpus, vocabulary, tmp_path, encoder, hidden_size):
    config = TrainConfig((corpus,), encoder=encoder, hidden_size=hidden_size or 1000, device="cpu")
    trainer = Trainer(Training(config, [corpus], vocabulary, tmp_path, Progress()))
    plain = PlainTrainer(
        PlainQuickThoughts(len(vocabulary), config.word_dim, hidden_size),
        config.batch_size,
        config.context_size,
    )

    first_batches = list(itertools.islice(batches([corpus], vocabulary, config.batch_size), BATCHES))
    ours, theirs = itertools.cycle(first_batches), itertools.cycle(first_batches)

    seconds, others = in_turns_with(
        benchmark,
        lambda: trainer.step(next(ours)),
        {"plain": lambda: plain.step(*next(theirs)[:2])},
        ROUNDS[encoder],
    )

    plain_seconds = others["plain"]
    benchmark.extra_info.update(
        N=config.batch_size,
        context_size=config.context_size,
        word_dim=config.word_dim,
        hidden_size=hidden_size,
        vocab_size=len(vocabulary),
        threads=torch.get_num_threads(),
        text=Path(corpus).name,
        sentences_per_second=config.batch_size / seconds,
        plain_seconds=plain_seconds,
        plain_sentences_per_second=config.batch_size / plain_seconds,
        times_faster=plain_seconds / seconds,
    )
