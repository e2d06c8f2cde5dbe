"""The tasks: the files that each reads, the sentences that it needs, and the evaluation of their vectors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import f1_score

from fastqt.errors import InputError
from fastqt.sentences.evaluation.classification import (
    accuracy,
    check_folds,
    cross_validated,
    held_out_validated,
    nested_cross_validation,
    pair_features,
)
from fastqt.sentences.evaluation.data import LabelledTexts, Pairs, read_labelled, read_pairs
from fastqt.sentences.evaluation.logistic import one_hot
from fastqt.sentences.evaluation.similarity import (
    POSITIVE_SCORE,
    alignment,
    correlate_subsets,
    cosines,
    relatedness,
    uniformity,
    why_undefined,
)
from fastqt.sentences.evaluation.vectors import Vectors
from fastqt.sentences.options.commands import EvaluationOptions

RELATED_SCORES = 5  # those of SICK are from 1 to this


class Task(Protocol):
    """A task whose files have been read."""

    def texts(self) -> Iterable[str]:
        """All sentences of the task."""

    def check(self, options: EvaluationOptions) -> None:
        """Raises InputError where the files cannot be evaluated, whatever the vectors are."""

    def evaluate(self, vectors: Vectors, options: EvaluationOptions) -> dict[str, Any]:
        """The results of the task by name, from the vectors of its sentences.

        A figure that is not defined is NaN, and beside it stands the reason, a sentence called "undefined".
        """


class Unchecked:
    """A task for which every file that can be read will do."""

    def check(self, options: EvaluationOptions) -> None:
        """Finds nothing wrong."""


@dataclass(frozen=True)
class CrossValidated:
    """MR, CR, SUBJ, MPQA: nested cross-validation."""

    examples: LabelledTexts

    def texts(self) -> Iterable[str]:
        return self.examples.texts

    def check(self, options: EvaluationOptions) -> None:
        _, (labels,) = _class_numbers(self.examples)
        check_folds(labels, nested=True, seed=options.seed)

    def evaluate(self, vectors: Vectors, options: EvaluationOptions) -> dict[str, Any]:
        _, (labels,) = _class_numbers(self.examples)
        result = nested_cross_validation(
            vectors(self.examples.texts), labels, grid=options.grid, seed=options.seed
        )
        return {"accuracy": result.accuracy, "folds": result.folds.tolist(), "C": result.C.tolist()}


@dataclass(frozen=True)
class TrainTest:
    """TREC: C is chosen by cross-validation of the training set."""

    train: LabelledTexts
    test: LabelledTexts

    def texts(self) -> Iterable[str]:
        return chain(self.train.texts, self.test.texts)

    def check(self, options: EvaluationOptions) -> None:
        _, (labels,) = _class_numbers(self.train)
        check_folds(labels, nested=False, seed=options.seed)

    def evaluate(self, vectors: Vectors, options: EvaluationOptions) -> dict[str, Any]:
        _, (labels, test_labels) = _class_numbers(self.train, self.test)
        chosen = cross_validated(vectors(self.train.texts), labels, grid=options.grid, seed=options.seed)
        test_accuracy = accuracy(chosen.log_probs(vectors(self.test.texts)), test_labels)
        return {"accuracy": test_accuracy, "cv_accuracy": chosen.score, "C": chosen.C}


@dataclass(frozen=True)
class TrainDevTest:
    """SST2: C is chosen on the development set."""

    train: LabelledTexts
    dev: LabelledTexts
    test: LabelledTexts

    def texts(self) -> Iterable[str]:
        return chain(self.train.texts, self.dev.texts, self.test.texts)

    def check(self, options: EvaluationOptions) -> None:
        if (classes := len(np.unique(self.train.labels))) < 2:
            raise InputError(f"labels: want at least two classes to train on, got {classes}")

    def evaluate(self, vectors: Vectors, options: EvaluationOptions) -> dict[str, Any]:
        classes, (labels, dev_labels, test_labels) = _class_numbers(self.train, self.dev, self.test)
        chosen = held_out_validated(
            vectors(self.train.texts),
            one_hot(labels, classes),
            vectors(self.dev.texts),
            lambda log_probs: accuracy(log_probs, dev_labels),
            grid=options.grid,
        )
        test_accuracy = accuracy(chosen.log_probs(vectors(self.test.texts)), test_labels)
        return {"accuracy": test_accuracy, "dev_accuracy": chosen.score, "C": chosen.C}


@dataclass(frozen=True)
class Paraphrase:
    """MRPC: accuracy and F1 on pair features; C is chosen by cross-validation of the training set."""

    train: Pairs
    test: Pairs

    def texts(self) -> Iterable[str]:
        return _texts(self.train, self.test)

    def check(self, options: EvaluationOptions) -> None:
        check_folds(self.train.gold.astype(np.int64), nested=False, seed=options.seed)

    def evaluate(self, vectors: Vectors, options: EvaluationOptions) -> dict[str, Any]:
        labels, test_labels = self.train.gold.astype(np.int64), self.test.gold.astype(np.int64)
        chosen = cross_validated(
            pair_features(vectors(self.train.first), vectors(self.train.second)),
            labels,
            grid=options.grid,
            seed=options.seed,
        )
        log_probs = chosen.log_probs(pair_features(vectors(self.test.first), vectors(self.test.second)))

        # Of equally likely classes the first one is taken, which is no paraphrase: F1 is no mean over pairs,
        # of which each could count a share.
        f1 = float(f1_score(test_labels, log_probs.argmax(axis=1), zero_division=np.nan))
        figures = {
            "accuracy": accuracy(log_probs, test_labels),
            "f1": f1,
            "cv_accuracy": chosen.score,
            "C": chosen.C,
        }
        return _with_reason(
            figures, "The test pairs hold no paraphrase, and none was found." if f1 != f1 else ""
        )


@dataclass(frozen=True)
class Related(Unchecked):
    """SICK: predicts the relatedness of pairs, from 1 to 5."""

    train: Pairs
    dev: Pairs
    test: Pairs

    def texts(self) -> Iterable[str]:
        return _texts(self.train, self.dev, self.test)

    def evaluate(self, vectors: Vectors, options: EvaluationOptions) -> dict[str, Any]:
        parts = [
            (vectors(part.first), vectors(part.second), part.gold)
            for part in (self.train, self.dev, self.test)
        ]
        figures = relatedness(*parts, grid=options.grid)._asdict()
        reason = why_undefined(figures.pop("predictions"), self.test.gold)
        on_dev = "C was chosen without a correlation on dev." if math.isnan(figures["dev_pearson"]) else ""
        return _with_reason(figures, " ".join(filter(None, (reason, on_dev))))


@dataclass(frozen=True)
class Similar(Unchecked):
    """STS12 to STS16 and STS-B: correlation of the cosines with the gold scores, without training."""

    parts: dict[str, Pairs]  # several parts are reported separately

    def texts(self) -> Iterable[str]:
        return _texts(*self.parts.values())

    def evaluate(self, vectors: Vectors, options: EvaluationOptions) -> dict[str, Any]:
        results = {name: self._correlations(part, vectors) for name, part in self.parts.items()}
        return results if len(results) > 1 else next(iter(results.values()))

    @staticmethod
    def _correlations(part: Pairs, vectors: Vectors) -> dict[str, Any]:
        scores = cosines(vectors(part.first), vectors(part.second))
        correlations = correlate_subsets(scores, part.gold, part.subset)
        reason = why_undefined(scores, part.gold)
        if len(correlations.subsets) == 1:
            return _with_reason(correlations.all._asdict(), reason)

        rows = {name: part.subset == name for name in correlations.subsets}
        reasons = {name: why_undefined(scores[each], part.gold[each]) for name, each in rows.items()}
        subsets = {
            name: _with_reason({**each._asdict(), "pairs": correlations.pairs[name]}, reasons[name])
            for name, each in correlations.subsets.items()
        }
        figures = {name: getattr(correlations, name)._asdict() for name in ("all", "mean", "wmean")}
        of_subsets = [f"{name}: {each}" for name, each in reasons.items() if each]
        return _with_reason({**figures, "subsets": subsets}, " ".join(filter(None, (reason, *of_subsets))))


@dataclass(frozen=True)
class AlignedUniform(Unchecked):
    """Alignment of the positive pairs and uniformity of all sentences in the development set of STS-B."""

    pairs: Pairs

    def texts(self) -> Iterable[str]:
        return _texts(self.pairs)

    def evaluate(self, vectors: Vectors, options: EvaluationOptions) -> dict[str, Any]:
        first, second = vectors(self.pairs.first), vectors(self.pairs.second)
        positive = self.pairs.gold > POSITIVE_SCORE
        figures = {
            "alignment": alignment(first[positive], second[positive]),
            "uniformity": uniformity(np.concatenate([first, second]), options.t),
            "t": options.t,
        }
        reason = (
            f"Alignment is that of pairs with a gold score above {POSITIVE_SCORE:g}; the highest one is "
            f"{self.pairs.gold.max():g}."
        )
        return _with_reason(figures, "" if positive.any() else reason)


def _with_reason(figures: dict[str, Any], reason: str) -> dict[str, Any]:
    """The figures, and why some of them are NaN, if some are."""
    return {**figures, "undefined": reason} if reason else figures


def _texts(*parts: Pairs) -> Iterable[str]:
    return chain.from_iterable(chain(part.first, part.second) for part in parts)


def _class_numbers(*parts: LabelledTexts) -> tuple[int, list[NDArray[np.int64]]]:
    """The number of classes, and the labels of each part as class numbers (n,)."""
    classes = np.unique(np.concatenate([part.labels for part in parts]))
    return len(classes), [np.searchsorted(classes, part.labels) for part in parts]


def _read_sts(year: Path) -> Task:
    pairs = read_pairs(year, gold=1, first=2, subset=0)
    # As in SentEval, STS13 is read without SMT, because that subset has a licence of its own.
    kept = (
        np.flatnonzero(pairs.subset != "SMT") if year.name.startswith("STS13") else np.arange(len(pairs.gold))
    )
    if not len(kept):
        raise InputError(f"{year}: want other pairs than those of SMT, which are left out, got none")
    first, second = ([column[row] for row in kept] for column in (pairs.first, pairs.second))
    return Similar({"test": Pairs(pairs.gold[kept], first, second, pairs.subset[kept])})


_read_stsb = partial(read_pairs, gold=1, first=2)
_read_sick = partial(read_pairs, gold=0, first=1, within=(1, RELATED_SCORES))


def _read_mrpc(path: Path) -> Pairs:
    pairs = read_pairs(path, gold=0, first=3, within=(0, 1))
    if len(broken := np.flatnonzero(pairs.gold % 1)):
        raise InputError(
            f"{path}: line {broken[0] + 1}: want 0 or 1 in column 1, got {pairs.gold[broken[0]]:g}"
        )
    return pairs


@dataclass(frozen=True)
class Source:
    """The files of a task, and the function that reads them."""

    files: tuple[str, ...]  # paths below the data directory, without suffix
    read: Callable[..., Task]


def sources(options: EvaluationOptions) -> dict[str, Source]:
    """The sources of all tasks by name."""
    tokenised = "_tok" if options.tokenised else ""
    stsb = [f"STSB{tokenised}/{part}" for part in ("train", "dev", "test")]
    splits = ("train", "dev", "test")
    years = range(12, 17)

    return {
        **{
            name: Source((f"{name}/all",), lambda path: CrossValidated(read_labelled(path)))
            for name in ("MR", "CR", "SUBJ", "MPQA")
        },
        "TREC": Source(
            ("TREC/train", "TREC/test"),
            lambda *paths: TrainTest(*(read_labelled(path, text=2) for path in paths)),
        ),
        "MRPC": Source(("MRPC/train", "MRPC/test"), lambda *paths: Paraphrase(*map(_read_mrpc, paths))),
        "SST2": Source(
            tuple(f"SST2/{options.sst}.{split}" for split in splits),
            lambda *paths: TrainDevTest(*map(read_labelled, paths)),
        ),
        "SICK": Source(
            tuple(f"SICK/{split}" for split in splits), lambda *paths: Related(*map(_read_sick, paths))
        ),
        **{f"STS{year}": Source((f"STS{tokenised}/STS{year}",), _read_sts) for year in years},
        "STSB": Source(
            (stsb[1], stsb[2]), lambda dev, test: Similar({"dev": _read_stsb(dev), "test": _read_stsb(test)})
        ),
        "ALIGN": Source((stsb[1],), lambda dev: AlignedUniform(_read_stsb(dev))),
    }
