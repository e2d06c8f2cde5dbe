"""The classifiers of the evaluation suite: fastqt's solver beside scikit-learn's, at equal convergence.

pytest --benchmark --benchmark-json benchmarks/results/logistic.json benchmarks/bench_logistic.py

It takes about four minutes and its run is stored on its own, so `make bench` leaves it out. fastqt fits all
training sets of a protocol at once. scikit-learn fits them one by one, so `SAMPLED` of them stand for all:
the median of their times is multiplied by the number of sets. All take the values of C in ascending order,
and begin each at the solution of the one before unless PEERS says otherwise. Each solver has one thread, and
its CPU time counts, which other work on the machine disturbs less than the wall clock. With more cores,
scikit-learn could fit a set on each, and fastqt could split each matrix product.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

import numpy as np
import pytest
import sklearn
import torch
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from threadpoolctl import threadpool_limits
from torch import Tensor
from torch.nn import functional as F

from fastqt.sentences.evaluation.classification import PAPER_GRID, split
from fastqt.sentences.evaluation.logistic import fit, one_hot

FOLDS = 10
SAMPLED = 3
PEERS = {  # options of scikit-learn's LogisticRegression; its default tolerance is 1e-4
    "lbfgs": {"solver": "lbfgs", "tol": 1e-6, "warm_start": True},
    "newton-cg": {"solver": "newton-cg", "tol": 1e-6, "warm_start": True},
    "lbfgs, default tolerance": {"solver": "lbfgs", "tol": 1e-4, "warm_start": True},
    "lbfgs, default tolerance, from zero": {"solver": "lbfgs", "tol": 1e-4, "warm_start": False},
}
PROTOCOLS = [  # of tasks as large as CR, MR (or SUBJ) and TREC: examples, width, classes
    ("nested", 4_000, 600, 2),
    ("nested", 10_000, 2_400, 2),
    ("cross-validation", 5_452, 600, 6),
]

Examples = tuple[NDArray[np.float32], NDArray[np.int64]]  # features (n, d) and class numbers (n,)
Solution = tuple[Tensor, Tensor]  # weights (d, K) and biases (K,) or (1, K)


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with threadpool_limits(1):
        yield
    torch.set_num_threads(before)


def vectors(n: int, d: int, classes: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Features like QuickThoughts' vectors, and noisy linear classes.

    The features have two halves of norm 1, a common mean and an unequal spread.
    """
    generator = np.random.default_rng(0)
    spread = generator.permutation(np.exp(-3 * np.arange(d) / d))
    points = generator.standard_normal((n, d)) * spread + 0.5 * generator.standard_normal(d)
    for half in np.split(points, 2, axis=1):
        half /= np.linalg.norm(half, axis=1, keepdims=True)
    scores = (points - points.mean(axis=0)) @ generator.standard_normal((d, classes))
    labels = (2 * scores / scores.std() + generator.gumbel(size=scores.shape)).argmax(axis=1)
    return points.astype(np.float32), labels


def training_sets(labels: NDArray[np.int64], protocol: str) -> NDArray[np.bool_]:
    """Which rows (P, n) each training set holds, as in `fastqt.sentences.evaluation.classification`."""
    tests = split(labels, FOLDS, 0)
    if protocol != "nested":
        return np.concatenate([~tests, np.ones((1, len(labels)), dtype=bool)])
    masks = []
    for test in tests:
        within = np.flatnonzero(~test)
        inner = np.zeros((FOLDS, len(labels)), dtype=bool)
        inner[:, within] = split(labels[within], FOLDS, 0)
        masks += [*(~test & ~inner), ~test]
    return np.array(masks)


def objective(solution: Solution, C: float, examples: Examples) -> float:
    """What all solvers minimise, divided by C and the number of examples, in float64."""
    features, labels = (torch.from_numpy(x) for x in examples)
    weight, bias = (x.double() for x in solution)
    logits = features.double() @ weight + bias
    if logits.shape[1] == 1:
        logits = torch.cat([torch.zeros_like(logits), logits], dim=1)
    return float(F.cross_entropy(logits, labels) + weight.square().sum() / (2 * C * len(labels)))


def excess(
    by_solver: dict[str, list[list[Solution]]], grid: Sequence[float], examples: list[Examples]
) -> dict[str, float]:
    """By how much each solver's objective is above the lowest that any found, at most over C and the sets."""
    values = {
        name: np.array(
            [
                [objective(solution, C, each) for solution, each in zip(of_sets, examples, strict=True)]
                for C, of_sets in zip(grid, solutions, strict=True)
            ]
        )
        for name, solutions in by_solver.items()
    }
    lowest = np.min(list(values.values()), axis=0)
    return {name: float((value - lowest).max()) for name, value in values.items()}


class Peer:
    """A solver of scikit-learn on some training sets, one value of C after the other."""

    def __init__(self, options: dict[str, Any], examples: list[Examples]) -> None:
        self.examples = examples
        self.estimators = [LogisticRegression(max_iter=10**6, **options) for _ in examples]
        self.seconds: list[float] = []  # of each C: the median of the training sets
        self.solutions: list[list[Solution]] = []  # of each C: those of the training sets

    def fit(self, C: float) -> None:
        times = []
        for estimator, (features, labels) in zip(self.estimators, self.examples, strict=True):
            estimator.set_params(C=C)
            begin = time.process_time()
            estimator.fit(features, labels)
            times.append(time.process_time() - begin)
        self.seconds.append(median(times))
        self.solutions.append(
            [(torch.from_numpy(e.coef_.T), torch.from_numpy(e.intercept_)) for e in self.estimators]
        )


@pytest.mark.parametrize(("protocol", "n", "d", "classes"), PROTOCOLS)
@pytest.mark.usefixtures("one_thread")
def test_logistic(benchmark, protocol, n, d, classes):
    features, labels = vectors(n, d, classes)
    sets = training_sets(labels, protocol)
    sampled = np.linspace(0, len(sets) - 1, SAMPLED).astype(int)
    examples = [(features[sets[i]], labels[sets[i]]) for i in sampled]
    peers = {name: Peer(options, examples) for name, options in PEERS.items()}
    grid = PAPER_GRID[:1] if benchmark.disabled else PAPER_GRID
    remaining, ours = iter(grid), fit(torch.from_numpy(features), one_hot(labels, classes), sets, grid)
    seconds: list[float] = []
    solutions: list[list[Solution]] = []

    def fit_peers() -> None:
        C = next(remaining)
        for peer in peers.values():
            peer.fit(C)

    def fit_ours() -> None:
        begin = time.process_time()
        weight, bias = next(ours)
        seconds.append(time.process_time() - begin)
        solutions.append([(weight[i], bias[i]) for i in sampled])

    benchmark.pedantic(fit_ours, setup=fit_peers, rounds=len(grid))
    by_solver = {"fastqt": solutions, **{name: peer.solutions for name, peer in peers.items()}}
    distances = excess(by_solver, grid, examples)
    benchmark.extra_info.update(
        protocol=protocol,
        n=n,
        d=d,
        classes=classes,
        training_sets=len(sets),
        sampled=SAMPLED,
        grid=list(grid),
        threads=torch.get_num_threads(),
        sklearn_version=sklearn.__version__,
        fastqt_seconds=sum(seconds),
        excess=distances["fastqt"],
        peers={
            name: {
                **PEERS[name],
                "seconds": sum(peer.seconds) * len(sets),
                "times_faster": sum(peer.seconds) * len(sets) / sum(seconds),
                "excess": distances[name],
            }
            for name, peer in peers.items()
        },
    )
