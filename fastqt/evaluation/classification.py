"""How well a logistic regression on frozen vectors tells classes apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.model_selection import StratifiedKFold, StratifiedShuffleSplit
from torch import Tensor

from fastqt.evaluation.logistic import Classifiers, fit, one_hot

PAPER_GRID = tuple(2.0**power for power in range(9))  # Logeswaran & Lee's C
SENTEVAL_GRID = tuple(2.0**power for power in range(-2, 4))
FOLDS = 10


class NestedResult(NamedTuple):
    """What nested cross-validation finds."""

    accuracy: float  # mean over the folds
    folds: NDArray[np.float64]  # accuracy of each
    C: NDArray[np.float64]  # that each chose
    predictions: NDArray[np.int64]  # (n,) class numbers, each by the classifier that did not see it


class Chosen(NamedTuple):
    """A classifier, with the C that was chosen for it and the score that decided."""

    classifier: Classifiers  # of one training set
    C: float
    score: float

    def log_probs(self, features: NDArray[np.floating]) -> NDArray[np.float64]:
        """(n, classes) natural logarithms."""
        return self.classifier.log_probs(_tensor(features))[0].double().numpy()


def split(labels: NDArray[np.int64], folds: int, seed: int) -> NDArray[np.bool_]:
    """Which rows each of the folds tests, (folds, n): shuffled, the classes in their shares."""
    tests = np.zeros((folds, len(labels)), dtype=bool)
    shuffled = StratifiedKFold(folds, shuffle=True, random_state=seed).split(labels, labels)
    for fold, (_, rows) in enumerate(shuffled):
        tests[fold, rows] = True
    return tests


def nested_cross_validation(
    features: NDArray[np.floating],  # (n, d)
    labels: NDArray[np.int64],  # (n,)
    *,
    grid: Sequence[float] = PAPER_GRID,
    folds: int = FOLDS,
    seed: int = 0,
    tests: NDArray[np.bool_] | None = None,  # (folds, n)
) -> NestedResult:
    """Accuracy in cross-validation, each fold with a C from cross-validation within its training rows.

    Of equal scores the smallest C wins.

    Args:
        features: (n, d), used as they are: not standardised.
        labels: (n,) class numbers from 0.
        grid: values of C, ascending.
        folds: of both cross-validations.
        seed: of the shuffles.
        tests: which rows each fold tests, in place of shuffled folds.
    """
    outer = split(labels, folds, seed) if tests is None else tests
    trained, tested = [], []
    for test in outer:
        within = np.flatnonzero(~test)
        inner = np.zeros((folds, len(labels)), dtype=bool)
        inner[:, within] = split(labels[within], folds, seed)
        trained += [*(~test & ~inner), ~test]
        tested += [*inner, test]
    train, held_out = np.array(trained), np.array(tested)
    data = _tensor(features)
    scores, guesses = [], []
    for classifiers in fit(data, _targets(labels), train, grid):
        guess = classifiers.log_probs(data).argmax(dim=2).numpy()
        right = ((guess == labels) & held_out).sum(axis=1) / held_out.sum(axis=1)
        scores.append(right.reshape(len(outer), folds + 1))
        guesses.append(guess[folds :: folds + 1])
    score = np.array(scores)  # (C, fold, inner folds and the test)
    choice = score[:, :, :folds].mean(axis=2).argmax(axis=0)
    each = np.arange(len(outer))
    accuracies = score[choice, each, folds]
    predictions = np.array(guesses)[choice, each]  # (fold, n)
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
    """A classifier of all rows, with the C that does best in cross-validation; of equals the smallest."""
    held_out = split(labels, folds, seed)
    train = np.concatenate([~held_out, np.ones((1, len(labels)), dtype=bool)])
    data = _tensor(features)
    scores, whole = [], []
    for classifiers in fit(data, _targets(labels), train, grid):
        guess = classifiers.log_probs(data)[:folds].argmax(dim=2).numpy()
        scores.append((((guess == labels) & held_out).sum(axis=1) / held_out.sum(axis=1)).mean())
        whole.append(Classifiers(classifiers.weight[-1:], classifiers.bias[-1:]))
    best = int(np.argmax(scores))
    return Chosen(whole[best], grid[best], float(scores[best]))


def held_out_validated(
    features: NDArray[np.floating],  # (n, d)
    targets: NDArray[np.float64],  # (n, classes)
    validation: NDArray[np.floating],  # (m, d)
    score: Callable[[NDArray[np.float64]], float],
    *,
    grid: Sequence[float] = PAPER_GRID,
) -> Chosen:
    """A classifier of all rows, with the C of the best score on held-out rows; of equals the smallest.

    Args:
        features, targets: see `fastqt.evaluation.logistic.fit`.
        validation: features (m, d) of the held-out rows.
        score: of their log-probabilities (m, classes); higher is better.
    """
    everything = np.ones((1, len(features)), dtype=bool)
    best: Chosen | None = None
    for C, classifier in zip(grid, fit(_tensor(features), targets, everything, grid), strict=True):
        chosen = Chosen(classifier, C, 0.0)
        value = score(chosen.log_probs(validation))
        if best is None or value > best.score:
            best = chosen._replace(score=value)
    assert best is not None  # a grid is not empty
    return best


def accuracy(log_probs: NDArray[np.float64], labels: NDArray[np.int64]) -> float:
    """The share of rows whose likeliest class is theirs."""
    return float((log_probs.argmax(axis=1) == labels).mean())


def pair_features(u: NDArray[np.floating], v: NDArray[np.floating]) -> NDArray[np.floating]:
    """[|u − v|, u ∘ v], (n, 2d): what a classifier of pairs sees."""
    return np.concatenate([np.abs(u - v), u * v], axis=1)


def ensemble(
    log_probs: Sequence[NDArray[np.float64]],  # (n, classes) each
    scores: Sequence[float],
) -> NDArray[np.float64]:
    """The weighted mean of several models' log-probabilities (n, classes).

    Args:
        log_probs: of each model.
        scores: of each model on validation data, positive; divided by their sum they are the weights.
    """
    weights = np.asarray(scores, dtype=np.float64)
    if len(weights) != len(log_probs) or not len(weights):
        raise ValueError(f"scores: wanted one for each of {len(log_probs)} models, got {len(weights)}")
    if not (weights > 0).all():
        raise ValueError(f"scores: wanted positive ones, got {list(scores)}")
    return np.tensordot(weights / weights.sum(), np.array(log_probs), axes=1)


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
    """Test accuracies of classifiers that were shown only so many training examples.

    Args:
        features, labels: the training set (n, d) and (n,), classes numbered from 0.
        test_features, test_labels: the test set.
        sizes: numbers of examples; drawn with the classes in their shares.
        repeats: draws for each size.
        grid, folds, seed: C is chosen by cross-validation of the examples drawn, in no more folds than the
            rarest class there has examples.

    Returns:
        For each size the accuracies of its draws, (repeats,).

    Raises:
        ValueError: a size at which a class would have fewer than two examples, or above the whole set's.
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
                raise ValueError(f"sizes: wanted at least two examples of each class, not so with {size}")
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
