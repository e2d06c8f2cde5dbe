"""Classification of frozen sentence vectors by logistic regression, and by means of a few of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import logsumexp
from sklearn.model_selection import StratifiedKFold, StratifiedShuffleSplit
from torch import Tensor

from fastqt.errors import InputError
from fastqt.sentences.evaluation.logistic import Classifiers, fit, one_hot
from fastqt.sentences.metrics import ROUNDING
from fastqt.sentences.options.commands import PAPER_GRID

FOLDS = 10


class NestedResult(NamedTuple):
    """The results of nested cross-validation."""

    accuracy: float  # mean over the folds
    folds: NDArray[np.float64]  # (folds,) accuracy of each fold
    C: NDArray[np.float64]  # (folds,) the C that each fold chose
    predictions: NDArray[np.int64]  # (n,) class of each row, predicted by the fold that tests it


class Chosen(NamedTuple):
    """A trained classifier, its C, and the score for which that C was chosen."""

    classifier: Classifiers  # with one training set, P = 1
    C: float
    score: float

    def log_probs(self, features: NDArray[np.floating]) -> NDArray[np.float64]:
        """The natural logarithms of the probabilities of the classes, (n, classes), for features (n, d)."""
        return self.classifier.log_probs(_tensor(features))[0].double().numpy()


def split(labels: NDArray[np.int64], folds: int, seed: int) -> NDArray[np.bool_]:
    """Draws shuffled folds that keep the shares of the classes, (folds, n) bool: what each fold tests.

    InputError where there is only one class, or no class has an example for each fold.
    """
    counts = np.unique(labels, return_counts=True)[1]
    if len(counts) < 2:
        raise InputError(f"labels: want at least two classes to train on, got {len(counts)}")
    if counts.max() < folds:
        raise InputError(
            f"labels: want at least {folds} examples of a class to train on {folds} folds, got {counts.max()}"
        )
    tests = np.zeros((folds, len(labels)), dtype=bool)
    shuffled = StratifiedKFold(folds, shuffle=True, random_state=seed).split(labels, labels)
    for fold, (_, rows) in enumerate(shuffled):
        tests[fold, rows] = True
    return tests


def check_folds(labels: NDArray[np.int64], *, nested: bool, seed: int) -> None:
    """Raises InputError where a cross-validation of these labels would, before there are any vectors."""
    for test in split(labels, FOLDS, seed):
        if nested:
            split(labels[~test], FOLDS, seed)


def nested_cross_validation(
    features: NDArray[np.floating],  # (n, d)
    labels: NDArray[np.int64],  # (n,)
    *,
    grid: Sequence[float] = PAPER_GRID,
    folds: int = FOLDS,
    seed: int = 0,
    tests: NDArray[np.bool_] | None = None,  # (folds, n)
) -> NestedResult:
    """Measures accuracy by nested cross-validation.

    Each outer fold chooses its C, one of an ascending grid, by an inner cross-validation of its training
    rows. Among equal scores, the smallest C is chosen. Features are not standardised, and labels are counted
    from 0. `tests` is the rows that each outer fold tests, drawn by `split` if it is not given.
    """
    outer = split(labels, folds, seed) if tests is None else tests
    train_sets, test_sets = [], []
    for test in outer:
        within = np.flatnonzero(~test)
        inner = np.zeros((folds, len(labels)), dtype=bool)
        inner[:, within] = split(labels[within], folds, seed)
        train_sets += [*(~test & ~inner), ~test]
        test_sets += [*inner, test]
    train, held_out = np.array(train_sets), np.array(test_sets)

    data = _tensor(features)
    scores, guesses = [], []
    for classifiers in fit(data, _targets(labels), train, grid):
        log_probs = classifiers.log_probs(data).numpy()
        right = (_hits(log_probs, labels) * held_out).sum(axis=1) / held_out.sum(axis=1)
        scores.append(right.reshape(len(outer), folds + 1))
        guesses.append(log_probs[folds :: folds + 1].argmax(axis=2))

    score = np.array(scores)  # (C, outer fold, inner folds followed by the outer test)
    choice = score[:, :, :folds].mean(axis=2).argmax(axis=0)
    outer_fold = np.arange(len(outer))
    accuracies = score[choice, outer_fold, folds]
    predictions = np.array(guesses)[choice, outer_fold]  # (outer fold, n)

    return NestedResult(
        float(accuracies.mean()),
        accuracies,
        np.asarray(grid)[choice],
        predictions[outer.argmax(axis=0), np.arange(len(labels))],
    )


def cross_validated(
    features: NDArray[np.floating],  # (n, d)
    labels: NDArray[np.int64],  # (n,)
    *,
    grid: Sequence[float] = PAPER_GRID,
    folds: int = FOLDS,
    seed: int = 0,
) -> Chosen:
    """Chooses C by cross-validation, and trains a classifier on all rows with it.

    Arguments are as of `nested_cross_validation`. The score is the mean accuracy of the folds; among equal
    ones, the smallest C is chosen.
    """
    held_out = split(labels, folds, seed)
    train = np.concatenate([~held_out, np.ones((1, len(labels)), dtype=bool)])
    data = _tensor(features)
    scores, full = [], []
    for classifiers in fit(data, _targets(labels), train, grid):
        log_probs = classifiers.log_probs(data)[:folds].numpy()
        scores.append(((_hits(log_probs, labels) * held_out).sum(axis=1) / held_out.sum(axis=1)).mean())
        full.append(Classifiers(classifiers.weight[-1:], classifiers.bias[-1:]))
    best = int(np.argmax(scores))
    return Chosen(full[best], grid[best], float(scores[best]))


def held_out_validated(
    features: NDArray[np.floating],  # (n, d)
    targets: NDArray[np.float64],  # (n, classes)
    validation: NDArray[np.floating],  # (m, d)
    score: Callable[[NDArray[np.float64]], float],
    *,
    grid: Sequence[float] = PAPER_GRID,
) -> Chosen:
    """Trains a classifier on all rows, with the C that scores best on held-out rows, or the smallest of them.

    Targets are shares of each class, and `score` maps log-probabilities (m, classes) to a score, the higher
    the better.
    """
    all_rows = np.ones((1, len(features)), dtype=bool)
    best: Chosen | None = None
    for C, classifier in zip(grid, fit(_tensor(features), targets, all_rows, grid), strict=True):
        chosen = Chosen(classifier, C, 0.0)
        value = score(chosen.log_probs(validation))
        if best is None or value > best.score or math.isnan(best.score):
            best = chosen._replace(score=value)
    assert best is not None  # because the grid is not empty
    return best


def accuracy(log_probs: NDArray[np.float64], labels: NDArray[np.int64]) -> float:
    """The share of rows of `log_probs`, (n, classes), whose likeliest class is the one of `labels`, (n,).

    Where t classes are the likeliest, each of them is chosen once in t times, so a row counts 1 / t.
    """
    return float(_hits(log_probs, labels).mean())


def _hits(log_probs: NDArray[np.floating], labels: NDArray[np.int64]) -> NDArray[np.float64]:
    """The chance (…, n) that a row of `log_probs`, (…, n, classes), gets its label, (n,).

    A label that is no class of the training, but only of a test, is never got.
    """
    best = log_probs.max(axis=-1, keepdims=True)
    likeliest = log_probs >= best - ROUNDING * np.finfo(np.float32).eps * np.abs(best)
    known = labels < log_probs.shape[-1]
    hits = likeliest[..., np.arange(len(labels)), np.where(known, labels, 0)] & known
    return np.asarray(hits / likeliest.sum(axis=-1).clip(1))


def pair_features(u: NDArray[np.floating], v: NDArray[np.floating]) -> NDArray[np.floating]:
    """The features [|u − v|, u ∘ v], (n, 2d), of pairs of sentences."""
    return np.concatenate([np.abs(u - v), u * v], axis=1)


def limited_data(
    features: NDArray[np.floating],
    labels: NDArray[np.int64],
    test_features: NDArray[np.floating],
    test_labels: NDArray[np.int64],
    sizes: Sequence[int],
    *,
    repeats: int = 10,
    grid: Sequence[float] = PAPER_GRID,
    folds: int = FOLDS,
    seed: int = 0,
) -> dict[int, NDArray[np.float64]]:
    """Test accuracy as a function of the number of training examples, with the C of `cross_validated`.

    Args:
        features, labels: (n, d) and class numbers (n,), the training set.
        grid: values of C, ascending.
        test_features, test_labels: the same of the test set.
        sizes: numbers of training examples. They are drawn so that the classes keep their shares.
        repeats: number of draws for each size.
        folds: number of folds; at most the number of drawn examples of the rarest class.
        seed: seed of the draws and the folds.

    Returns:
        For each size the test accuracies (repeats,) of its draws.

    Raises:
        ValueError: a size is larger than the training set, or leaves a class with fewer than two examples.

    Example:
        >>> import numpy as np
        >>> from fastqt.sentences.evaluation import limited_data
        >>> draw = np.random.default_rng(0)
        >>> labels = np.arange(40) % 2
        >>> features = draw.normal(size=(40, 4)) + 5 * labels[:, None]  # two classes far apart
        >>> rows = features[:30], labels[:30], features[30:], labels[30:]
        >>> found = limited_data(*rows, sizes=[8], folds=2, repeats=3, grid=[1.0])
        >>> found[8].tolist()
        [1.0, 1.0, 1.0]
    """
    curve = {}
    for size in sizes:
        accuracies = []
        if size == len(labels):
            draws = iter([np.arange(size)] * repeats)
        else:
            drawn = StratifiedShuffleSplit(repeats, train_size=size, random_state=seed)
            draws = (rows for rows, _ in drawn.split(labels, labels))
        for draw, rows in enumerate(draws):
            rarest = int(np.bincount(labels[rows], minlength=labels.max() + 1).min())
            if rarest < 2:
                raise ValueError(f"sizes: want at least two examples of each class, not so with {size}")
            chosen = cross_validated(
                features[rows], labels[rows], grid=grid, folds=min(folds, rarest), seed=seed + draw
            )
            accuracies.append(accuracy(chosen.log_probs(test_features), test_labels))
        curve[size] = np.array(accuracies)
    return curve


def _targets(labels: NDArray[np.int64]) -> NDArray[np.float64]:
    return one_hot(labels, int(labels.max()) + 1)


def _tensor(features: NDArray[np.floating]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(features, dtype=np.float32))


class MeanClassifier(NamedTuple):
    """The results of a classifier whose weights are class means."""

    accuracy: float
    loss: float  # mean over the test rows of logsumexp(W x) − (W x)_label, CURL's supervised loss


def few_shot(
    positives: NDArray[np.floating],  # (n, d)
    others: NDArray[np.floating],  # (m, d)
    shots: int,
    *,
    repeats: int = 10,
    seed: int = 0,
) -> list[MeanClassifier]:
    """Classifies sentences as members of a class or as random sentences, by the means of a few of each.

    Args:
        positives: (n, d) vectors of the class.
        others: (m, d) vectors of random sentences.
        shots: number of vectors of each kind that are drawn for the means. Of the remaining vectors, equally
            many of each kind are tested.
        repeats: number of draws.
        seed: seed of the draws.

    Returns:
        One result for each draw.

    Raises:
        ValueError: `shots` is less than 1, or leaves no vector of a kind to test.

    Example:
        >>> import numpy as np
        >>> from fastqt.sentences.evaluation import few_shot
        >>> positives, others = np.tile([1.0, 0.0], (8, 1)), np.tile([0.0, 1.0], (8, 1))
        >>> [found.accuracy for found in few_shot(positives, others, shots=2, repeats=3)]
        [1.0, 1.0, 1.0]
    """
    if not 1 <= shots < min(len(positives), len(others)):
        raise ValueError(
            f"shots: want at least 1 and fewer than {len(positives)} positives and {len(others)} others, "
            f"got {shots}"
        )
    generator = np.random.default_rng(seed)
    results = []
    for _ in range(repeats):
        trained, random = (
            generator.permutation(np.asarray(rows, dtype=np.float64)) for rows in (positives, others)
        )
        tested = min(len(trained), len(random)) - shots
        weights = np.stack([random[:shots].mean(axis=0), trained[:shots].mean(axis=0)])
        test = np.concatenate([random[shots:][:tested], trained[shots:][:tested]])
        results.append(_of_means(weights, test, np.repeat([0, 1], tested)))
    return results


def _of_means(
    weights: NDArray[np.float64], features: NDArray[np.floating], labels: NDArray[np.int64]
) -> MeanClassifier:
    scores = np.asarray(features, dtype=np.float64) @ weights.T
    losses = logsumexp(scores, axis=1) - scores[np.arange(len(labels)), labels]
    return MeanClassifier(accuracy(scores, labels), float(losses.mean()))
