"""CURL's mean classifier on encoders that were trained with contrastive losses, beside an untrained one.

CURL's theory has one encoder for a sentence, its neighbours and its negatives, and so has each of these
models: a bag of words that starts from GloVe vectors. All train with the same batches. Then the class means
of the vectors classify, as they are and at norm 1, beside logistic regression on the same vectors.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.papers.few_labels import labelled
from benchmarks.papers.parts import made
from benchmarks.papers.plans import SEEDS
from benchmarks.papers.runs import Places
from fastqt import contrastive_loss, curl_block_loss, curl_loss
from fastqt.nn import BagOfWords
from fastqt.sentences.evaluation.classification import (
    FOLDS,
    accuracy,
    cross_validated,
    nested_cross_validation,
    split,
)
from fastqt.sentences.evaluation.data import find, read_labelled
from fastqt.sentences.evaluation.means import MeanClassifier, mean_classifier
from fastqt.sentences.text import Batch, Vocabulary, batches, pad, read_blocks
from fastqt.sentences.text.vectors import vectors_of
from fastqt.sentences.train.optim import Adam, clip_gradients

CORPUS = "@data/corpus/train.txt.xz"
TASKS = ("MR", "CR", "SUBJ", "TREC")
SETTINGS = {
    **{"corpus": [CORPUS], "vectors": "@glove", "vectors-scale": 0.05, "batch-size": 400, "steps": 1300},
    **{"learning-rate": 5e-4, "clip": 5.0, "few": 5, "draws-of-few": 10},
}
BLOCK = 2  # neighbours on each side whose mean is the positive of a block
ENCODED = 2048  # sentences that are encoded together


def pairs_loss(vectors: Tensor, batch: Batch, generator: torch.Generator) -> Tensor:
    """The next sentence against a random one of the batch, where the next one is of the same document."""
    follows = (batch.document_ids[1:] == batch.document_ids[:-1]).nonzero().squeeze(1)
    others = torch.randint(len(vectors), (len(follows),), generator=generator)
    return curl_loss(vectors[follows], vectors[follows + 1], vectors[others])


def blocks_loss(vectors: Tensor, batch: Batch, generator: torch.Generator) -> Tensor:
    """The mean of the neighbours against that of as many sentences half a batch away."""
    return curl_block_loss(vectors, vectors, context_size=BLOCK, document_ids=batch.document_ids)


def context_loss(vectors: Tensor, batch: Batch, generator: torch.Generator) -> Tensor:
    """QuickThoughts: the neighbours among all sentences of the batch."""
    return contrastive_loss(vectors, vectors, context_size=1, document_ids=batch.document_ids)


Loss = Callable[[Tensor, Batch, torch.Generator], Tensor]
LOSSES: dict[str, Loss | None] = {
    "before training": None,
    "CURL, pairs": pairs_loss,
    "CURL, blocks": blocks_loss,
    "QuickThoughts": context_loss,
}


class Task(NamedTuple):
    """A task's sentences, class numbers (n,), and the rows that each fold tests, (folds, n) bool."""

    texts: list[str]
    labels: NDArray[np.int64]
    tests: NDArray[np.bool_]


@dataclass(frozen=True)
class Learnt:
    """An encoder, and what classifiers find in its vectors.

    Attributes:
        loss: one of `LOSSES`.
        seed: of the vectors that are drawn for words without a GloVe vector, and of the negatives.
    """

    loss: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.loss}, seed {self.seed}"

    def settings(self) -> dict[str, Any]:
        return {**SETTINGS, "loss": self.loss, "seed": self.seed, "block": BLOCK, "tasks": [*TASKS]}

    def perform(self, places: Places) -> dict[str, Any]:
        began = time.process_time()
        corpus = [places.resolve(CORPUS)]
        vocabulary = Vocabulary.build(
            sentence for block in read_blocks(corpus) for sentence in block.sentences
        )
        encoder = _encoder(vocabulary, places.resolve(SETTINGS["vectors"]), self.seed)
        loss = LOSSES[self.loss]
        log = [] if loss is None else _train(encoder, loss, batches(corpus, vocabulary, 400), self.seed)
        minutes = (time.process_time() - began) / 60
        return {
            **{"settings": self.settings(), "sha256": _digest(encoder), "made": made()},
            **{"cpu_minutes": minutes, "log": log},
            "tasks": {task: _classified(encoder, vocabulary, _read(places, task)) for task in TASKS},
        }


def plan() -> list[Learnt]:
    """All losses, from each seed."""
    return [Learnt(loss, seed) for seed in SEEDS for loss in LOSSES]


def _encoder(vocabulary: Vocabulary, vectors: str, seed: int) -> BagOfWords:
    """A bag of words in which the words of a file have its vectors."""
    ids = vocabulary.tokenizer.get_vocab()
    words = sorted(ids, key=ids.__getitem__)
    glove = vectors_of(vectors, words)
    torch.manual_seed(seed)
    encoder = BagOfWords(len(vocabulary), glove.vectors.shape[1], sparse=True)
    with torch.no_grad():
        known = torch.from_numpy(glove.places)
        encoder.embedding.weight[known] = torch.from_numpy(glove.vectors) * SETTINGS["vectors-scale"]
    return encoder


def _train(
    encoder: BagOfWords, loss: Loss, batch_iterator: Iterator[Batch], seed: int
) -> list[dict[str, float]]:
    """Trains in place; the mean loss of each tenth of the steps."""
    steps = int(SETTINGS["steps"])
    optimizer = Adam(encoder.parameters(), lr=SETTINGS["learning-rate"])
    generator = torch.Generator().manual_seed(seed)
    values = []
    for batch in islice(batch_iterator, steps):
        value = loss(encoder(batch.tokens, batch.lengths), batch, generator)
        value.backward()
        clip_gradients(encoder.parameters(), SETTINGS["clip"])
        optimizer.step()
        values.append(value.item())
    return [
        {"step": len(part) * (number + 1), "loss": float(np.mean(part))}
        for number, part in enumerate(np.array_split(np.array(values), 10))
    ]


def _digest(encoder: BagOfWords) -> str:
    return hashlib.sha256(encoder.embedding.weight.detach().numpy().tobytes()).hexdigest()


@torch.inference_mode()
def _encoded(encoder: BagOfWords, vocabulary: Vocabulary, texts: list[str]) -> NDArray[np.float32]:
    parts = (texts[begin : begin + ENCODED] for begin in range(0, len(texts), ENCODED))
    return np.concatenate([encoder(*pad(vocabulary.encode(part))).numpy() for part in parts])


def _read(places: Places, task: str) -> Task:
    if task != "TREC":
        texts, labels = labelled(places, task)
        return Task(texts, labels, split(labels, FOLDS, 0))
    paths = find(places.data / "eval", "TREC/train", "TREC/test")
    if paths is None:
        raise FileNotFoundError(f"{places.data / 'eval'}: want TREC/train.tsv.xz and TREC/test.tsv.xz")
    train, test = (read_labelled(path, text=2) for path in paths)
    labels = np.unique([*train.labels, *test.labels], return_inverse=True)[1].astype(np.int64)
    return Task(train.texts + test.texts, labels, (np.arange(len(labels)) >= len(train.texts))[None])


def _classified(encoder: BagOfWords, vocabulary: Vocabulary, task: Task) -> dict[str, Any]:
    """The results of both classifiers on the vectors as they are, and at norm 1."""
    raw = _encoded(encoder, vocabulary, task.texts)
    unit = raw / np.maximum(np.linalg.norm(raw, axis=1, keepdims=True), 1e-12)
    return {form: classified(vectors, task) for form, vectors in (("raw", raw), ("unit", unit))}


def classified(vectors: NDArray[np.float32], task: Task) -> dict[str, float]:
    """The accuracies of classifiers on a task, each the mean over its folds.

    Args:
        vectors: (n, d).
        task: what they are vectors of.

    Returns:
        "logistic": logistic regression, with C by cross-validation within the training rows; "means": the
        mean classifier, and "loss", CURL's supervised loss of it; "centred": the mean classifier of vectors
        minus the mean of the training rows; "few" and "few_centred": the same from a few rows of each class.
    """
    generator = np.random.default_rng(0)
    draws: dict[str, list[float]] = {"means": [], "loss": [], "centred": [], "few": [], "few_centred": []}
    for test in task.tests:
        rows = np.flatnonzero(~test)
        means = _means(vectors, task.labels, rows, test)
        draws["means"].append(means.accuracy)
        draws["loss"].append(means.loss)
        centred = vectors - vectors[rows].mean(axis=0)
        draws["centred"].append(_means(centred, task.labels, rows, test).accuracy)
        for _ in range(int(SETTINGS["draws-of-few"])):
            drawn = _few(task.labels, rows, int(SETTINGS["few"]), generator)
            draws["few"].append(_means(vectors, task.labels, drawn, test).accuracy)
            draws["few_centred"].append(_means(centred, task.labels, drawn, test).accuracy)
    return {"logistic": _logistic(vectors, task), **{name: float(np.mean(x)) for name, x in draws.items()}}


def _means(
    vectors: NDArray[np.float32], labels: NDArray[np.int64], rows: NDArray[np.int64], test: NDArray[np.bool_]
) -> MeanClassifier:
    return mean_classifier(vectors[rows], labels[rows], vectors[test], labels[test])


def _few(
    labels: NDArray[np.int64], rows: NDArray[np.int64], few: int, generator: np.random.Generator
) -> NDArray[np.int64]:
    """A few of the rows of each class."""
    shuffled = generator.permutation(rows)
    return np.concatenate([shuffled[labels[shuffled] == number][:few] for number in range(labels.max() + 1)])


def _logistic(vectors: NDArray[np.float32], task: Task) -> float:
    if len(task.tests) > 1:
        return nested_cross_validation(vectors, task.labels, tests=task.tests).accuracy
    test = task.tests[0]
    chosen = cross_validated(vectors[~test], task.labels[~test])
    return accuracy(chosen.log_probs(vectors[test]), task.labels[test])
