"""The benchmarks: what each reads, which sentences it needs, and how it judges their vectors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import f1_score

from fastqt.errors import InputError
from fastqt.evaluation.classification import (
    PAPER_GRID,
    accuracy,
    cross_validated,
    held_out_validated,
    nested_cross_validation,
    pair_features,
)
from fastqt.evaluation.data import Labelled, Pairs, find, read_labelled, read_pairs
from fastqt.evaluation.logistic import one_hot
from fastqt.evaluation.similarity import alignment, correlate_subsets, cosines, relatedness, uniformity
from fastqt.evaluation.vectors import Vectors

ALIGNED = 4.0  # pairs with a higher score are positives


@dataclass(frozen=True)
class Options:
    """What the literature does in more than one way."""

    seed: int = 0
    grid: Sequence[float] = PAPER_GRID  # values of C
    sst: str = "phrases"  # SST2's training set: all labelled phrases, or whole "sentences"
    tokenised: bool = False  # STS as SentEval prepares it: lower-cased, tokens apart
    t: float = 2.0  # of uniformity


class Task(Protocol):
    """A benchmark that has been read."""

    def texts(self) -> Iterable[str]: ...

    def judge(self, vectors: Vectors, options: Options) -> dict[str, Any]: ...


@dataclass(frozen=True)
class CrossValidated:
    """MR, CR, SUBJ, MPQA: nested cross-validation."""

    examples: Labelled

    def texts(self) -> Iterable[str]:
        return self.examples.texts

    def judge(self, vectors: Vectors, options: Options) -> dict[str, Any]:
        _, (labels,) = _numbered(self.examples)
        result = nested_cross_validation(
            vectors(self.examples.texts), labels, grid=options.grid, seed=options.seed
        )
        return {"accuracy": result.accuracy, "folds": result.folds.tolist(), "C": result.C.tolist()}


@dataclass(frozen=True)
class TrainTest:
    """TREC: C by cross-validation of the training set."""

    train: Labelled
    test: Labelled

    def texts(self) -> Iterable[str]:
        return chain(self.train.texts, self.test.texts)

    def judge(self, vectors: Vectors, options: Options) -> dict[str, Any]:
        _, (labels, wanted) = _numbered(self.train, self.test)
        chosen = cross_validated(vectors(self.train.texts), labels, grid=options.grid, seed=options.seed)
        found = accuracy(chosen.log_probs(vectors(self.test.texts)), wanted)
        return {"accuracy": found, "cv_accuracy": chosen.score, "C": chosen.C}


@dataclass(frozen=True)
class TrainDevTest:
    """SST2: C by the development set."""

    train: Labelled
    dev: Labelled
    test: Labelled

    def texts(self) -> Iterable[str]:
        return chain(self.train.texts, self.dev.texts, self.test.texts)

    def judge(self, vectors: Vectors, options: Options) -> dict[str, Any]:
        classes, (labels, dev, wanted) = _numbered(self.train, self.dev, self.test)
        chosen = held_out_validated(
            vectors(self.train.texts),
            one_hot(labels, classes),
            vectors(self.dev.texts),
            lambda log_probs: accuracy(log_probs, dev),
            grid=options.grid,
        )
        found = accuracy(chosen.log_probs(vectors(self.test.texts)), wanted)
        return {"accuracy": found, "dev_accuracy": chosen.score, "C": chosen.C}


@dataclass(frozen=True)
class Paraphrase:
    """MRPC: pair features, C by cross-validation of the training set, accuracy and F1."""

    train: Pairs
    test: Pairs

    def texts(self) -> Iterable[str]:
        return _texts(self.train, self.test)

    def judge(self, vectors: Vectors, options: Options) -> dict[str, Any]:
        labels, wanted = self.train.gold.astype(np.int64), self.test.gold.astype(np.int64)
        chosen = cross_validated(
            pair_features(vectors(self.train.first), vectors(self.train.second)),
            labels,
            grid=options.grid,
            seed=options.seed,
        )
        log_probs = chosen.log_probs(pair_features(vectors(self.test.first), vectors(self.test.second)))
        return {
            "accuracy": accuracy(log_probs, wanted),
            "f1": float(f1_score(wanted, log_probs.argmax(axis=1))),
            "cv_accuracy": chosen.score,
            "C": chosen.C,
        }


@dataclass(frozen=True)
class Related:
    """SICK: relatedness from 1 to 5, learnt."""

    train: Pairs
    dev: Pairs
    test: Pairs

    def texts(self) -> Iterable[str]:
        return _texts(self.train, self.dev, self.test)

    def judge(self, vectors: Vectors, options: Options) -> dict[str, Any]:
        parts = [
            (vectors(part.first), vectors(part.second), part.gold)
            for part in (self.train, self.dev, self.test)
        ]
        result = relatedness(*parts, grid=options.grid)._asdict()
        del result["predictions"]
        return result


@dataclass(frozen=True)
class Similar:
    """STS12 to STS16 and STS-B: the cosine's correlation with the judges, nothing learnt."""

    parts: dict[str, Pairs]  # one, or several that are reported apart

    def texts(self) -> Iterable[str]:
        return _texts(*self.parts.values())

    def judge(self, vectors: Vectors, options: Options) -> dict[str, Any]:
        results = {name: self._correlations(part, vectors) for name, part in self.parts.items()}
        return results if len(results) > 1 else next(iter(results.values()))

    @staticmethod
    def _correlations(part: Pairs, vectors: Vectors) -> dict[str, Any]:
        scores = cosines(vectors(part.first), vectors(part.second))
        found = correlate_subsets(scores, part.gold, part.subset)
        if len(found.subsets) == 1:
            return found.all._asdict()
        return {
            **{name: getattr(found, name)._asdict() for name in ("all", "mean", "wmean")},
            "subsets": {
                name: {**each._asdict(), "pairs": found.pairs[name]} for name, each in found.subsets.items()
            },
        }


@dataclass(frozen=True)
class AlignedUniform:
    """Alignment of STS-B's positive pairs, and uniformity of its sentences, of the development set."""

    pairs: Pairs

    def texts(self) -> Iterable[str]:
        return _texts(self.pairs)

    def judge(self, vectors: Vectors, options: Options) -> dict[str, Any]:
        first, second = vectors(self.pairs.first), vectors(self.pairs.second)
        positive = self.pairs.gold > ALIGNED
        return {
            "alignment": alignment(first[positive], second[positive]),
            "uniformity": uniformity(np.concatenate([first, second]), options.t),
            "t": options.t,
        }


def _texts(*parts: Pairs) -> Iterable[str]:
    return chain.from_iterable(chain(part.first, part.second) for part in parts)


def _numbered(*parts: Labelled) -> tuple[int, list[NDArray[np.int64]]]:
    """How many classes there are, and each part's labels as their numbers."""
    classes = np.unique(np.concatenate([part.labels for part in parts]))
    return len(classes), [np.searchsorted(classes, part.labels) for part in parts]


def _read_sts(year: Path) -> Task:
    pairs = read_pairs(year, gold=1, first=2, subset=0)
    # SentEval leaves this subset of 2013 out, whose licence is its own.
    kept = (
        np.flatnonzero(pairs.subset != "SMT") if year.name.startswith("STS13") else np.arange(len(pairs.gold))
    )
    first, second = ([column[row] for row in kept] for column in (pairs.first, pairs.second))
    return Similar({"test": Pairs(pairs.gold[kept], first, second, pairs.subset[kept])})


def _stsb(path: Path) -> Pairs:
    return read_pairs(path, gold=1, first=2)


def _mrpc(path: Path) -> Pairs:
    return read_pairs(path, gold=0, first=3)


def _sick(path: Path) -> Pairs:
    return read_pairs(path, gold=0, first=1)


@dataclass(frozen=True)
class Source:
    """Where a task's files lie below the data directory, and how they are read."""

    files: tuple[str, ...]
    read: Callable[..., Task]


def sources(options: Options) -> dict[str, Source]:
    """All tasks by name."""
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
        "MRPC": Source(("MRPC/train", "MRPC/test"), lambda *paths: Paraphrase(*map(_mrpc, paths))),
        "SST2": Source(
            tuple(f"SST2/{options.sst}.{split}" for split in splits),
            lambda *paths: TrainDevTest(*map(read_labelled, paths)),
        ),
        "SICK": Source(
            tuple(f"SICK/{split}" for split in splits), lambda *paths: Related(*map(_sick, paths))
        ),
        **{f"STS{year}": Source((f"STS{tokenised}/STS{year}",), _read_sts) for year in years},
        "STSB": Source(
            (stsb[1], stsb[2]), lambda dev, test: Similar({"dev": _stsb(dev), "test": _stsb(test)})
        ),
        "ALIGN": Source((stsb[1],), lambda dev: AlignedUniform(_stsb(dev))),
    }


def read_tasks(data: Path, names: Sequence[str] | None, options: Options) -> dict[str, Task]:
    """Reads the tasks named, or all that are there.

    Raises:
        InputError: a task that does not exist, or whose files are not in `data`.
    """
    if not data.is_dir():
        raise InputError(f"data: {data} is not a directory")
    known = sources(options)
    there = {name: paths for name, source in known.items() if (paths := find(data, *source.files))}
    if not there:
        raise InputError(f"data: {data} holds none of the tasks {', '.join(known)}")
    chosen = list(there) if names is None else list(dict.fromkeys(names))
    for name in chosen:
        if name not in known:
            raise InputError(f"tasks: wanted some of {', '.join(known)}, got {name!r}")
        if name not in there:
            files = " and ".join(f"{file}.tsv.xz" for file in known[name].files)
            raise InputError(f"tasks: {name} needs {files} in {data}, which holds {', '.join(there)}")
    return {name: known[name].read(*there[name]) for name in chosen}
