"""How many labels a sentence classifier needs: accuracy over the number of labelled sentences.

A stratified tenth to a third of a task is held out to test on. Of the rest, n sentences are drawn several
times, and logistic regression is trained on each draw, with C chosen by cross-validation of the drawn ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.model_selection import train_test_split

from benchmarks.papers.parts import load, made, trained
from benchmarks.papers.runs import Places
from fastqt.sentences.evaluation.baselines import WordVectors
from fastqt.sentences.evaluation.classification import limited_data
from fastqt.sentences.evaluation.data import find, read_labelled
from fastqt.sentences.evaluation.encoders import NamedEncoder
from fastqt.sentences.inference.encoder import SentenceEncoder
from fastqt.sentences.text import Vocabulary
from fastqt.sentences.text.vectors import vectors_of

SYSTEMS = {
    "mean of GloVe": "word-vectors:@glove",
    "bag of words before training": "random:@quickthoughts/bow from GloVe",
    "bag of words from GloVe": "@quickthoughts/bow from GloVe",
    # The bag has the words of the novels alone. These two tell what that costs.
    "the bag with GloVe's words": "expanded:@quickthoughts/bow from GloVe",
    "mean of GloVe, the bag's words": "known-words:@quickthoughts/bow from GloVe",
}
TASKS = ("MR", "CR", "SUBJ")
SIZES = (8, 32, 128, 512, 2048)


@dataclass(frozen=True)
class FewLabels:
    """The curve of an encoder on a task.

    Attributes:
        system: one of `SYSTEMS`.
        task: one of `TASKS`.
        sizes: numbers of labelled sentences.
        draws: of each number.
        tested: sentences that are held out to test on.
        seed: of the held-out sentences and of the draws.
    """

    system: str
    task: str
    sizes: tuple[int, ...] = SIZES
    draws: int = 20
    tested: int = 1000
    seed: int = 0

    @property
    def name(self) -> str:
        return f"{self.task}, {self.system}"

    def settings(self) -> dict[str, Any]:
        return {**asdict(self), "sizes": [*self.sizes], "encoder": SYSTEMS[self.system]}

    def perform(self, places: Places) -> dict[str, Any]:
        texts, labels = labelled(places, self.task)
        encoder = _load(SYSTEMS[self.system], places)
        features = np.asarray(encoder.encode(texts), dtype=np.float32)

        rest, tested = train_test_split(
            np.arange(len(labels)), test_size=self.tested, stratify=labels, random_state=self.seed
        )

        by_size = limited_data(
            features[rest],
            labels[rest],
            features[tested],
            labels[tested],
            self.sizes,
            repeats=self.draws,
            seed=self.seed,
        )

        return {
            **{"settings": self.settings(), "sha256": encoder.key, "made": made()},
            **{"width": features.shape[1], "sentences": len(labels)},
            "accuracies": {str(size): accuracies.tolist() for size, accuracies in by_size.items()},
        }


def labelled(places: Places, task: str) -> tuple[list[str], NDArray[np.int64]]:
    """The sentences of MR, CR or SUBJ, and their class numbers (n,)."""
    paths = find(places.data / "eval", f"{task}/all")
    if paths is None:
        raise FileNotFoundError(f"{places.data / 'eval'}: want {task}/all.tsv.xz")
    examples = read_labelled(paths[0])
    return examples.texts, np.unique(examples.labels, return_inverse=True)[1].astype(np.int64)


def _load(name: str, places: Places) -> NamedEncoder:
    kind, _, model = name.partition(":")
    if kind != "known-words":
        return load(name, places)
    table, _, run = model.removeprefix("@").partition("/")
    vocabulary = SentenceEncoder.load(trained(table, run, places)).vocabulary
    assert isinstance(vocabulary, Vocabulary)
    known = sorted({word.lower() for word in vocabulary.tokenizer.get_vocab()})
    glove = vectors_of(places.resolve("@glove"), known)
    encode = WordVectors([known[place] for place in glove.places], glove.vectors)
    return NamedEncoder(encode, hashlib.sha256(glove.vectors.tobytes()).hexdigest())


def plan() -> list[FewLabels]:
    """All curves."""
    return [FewLabels(system, task) for system in SYSTEMS for task in TASKS]


def curve(record: Mapping[str, Any]) -> dict[int, tuple[float, float]]:
    """Mean and standard deviation of the draws for each number of labels, in per cent."""
    return {
        int(size): (100 * float(np.mean(values)), 100 * float(np.std(values, ddof=1)))
        for size, values in record["accuracies"].items()
    }
