"""Fitted maps between vector spaces, against known maps and against the normal equations."""

import numpy as np
import pytest

from fastqt.sentences.text import Vocabulary
from fastqt.sentences.text.expansion import expand_table, expand_vocabulary, fit_affine
from tests.shared.tolerances import FLOAT32, FLOAT64, relative

V, D, P, W = 60, 7, 90, 5


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(0)


def test_fit_recovers_an_exact_affine_map(random):
    matrix, intercept = random.normal(size=(W, D)), random.normal(size=D)
    sources = random.normal(3.0, 2.0, size=(P, W))
    fitted = fit_affine(sources, sources @ matrix + intercept)
    assert relative(fitted.matrix, matrix) <= FLOAT64
    assert relative(fitted.intercept, intercept) <= FLOAT64
    assert relative(fitted(sources), sources @ matrix + intercept) <= FLOAT64


def test_fit_with_noise_solves_the_normal_equations(random):
    sources, targets = random.normal(size=(P, W)), random.normal(size=(P, D))
    fitted = fit_affine(sources.astype(np.float32), targets.astype(np.float32))
    design = np.hstack([sources.astype(np.float32), np.ones((P, 1))]).astype(np.float64)
    wanted = np.linalg.solve(design.T @ design, design.T @ targets.astype(np.float32).astype(np.float64))
    assert relative(np.vstack([fitted.matrix, fitted.intercept]), wanted) <= FLOAT64


def test_trained_rows_stay_and_new_words_get_mapped_vectors(random):
    table = random.normal(size=(V, D)).astype(np.float32)
    vectors = random.normal(size=(P, W)).astype(np.float32)
    rows = np.full(P, -1)
    rows[:40] = random.permutation(V)[:40]
    order = random.permutation(P)
    vectors, rows = vectors[order], rows[order]
    expanded = expand_table(table, vectors, rows)
    assert expanded.dtype == np.float32
    assert np.array_equal(expanded[:V], table)
    shared = [p for p in range(P) if rows[p] >= 0]
    design = np.array([[*vectors[p].astype(np.float64), 1.0] for p in shared])
    solution = np.linalg.lstsq(
        design, np.array([table[rows[p]] for p in shared]).astype(np.float64), rcond=None
    )[0]
    wanted = [[*vectors[p].astype(np.float64), 1.0] @ solution for p in range(P) if rows[p] < 0]
    assert relative(expanded[V:], np.array(wanted)) <= FLOAT32


def test_new_words_are_appended_to_the_vocabulary():
    vocabulary = Vocabulary.build(["the cat sat", "the cat"], 3, unknown="drop", max_length=4)
    grown = expand_vocabulary(vocabulary, ["mat", "sat"])
    assert len(vocabulary) == 3
    assert len(grown) == 5
    assert vocabulary.encode(["the cat sat on the mat"]).ids.tolist() == [2, 1, 2]
    assert grown.encode(["the cat sat on the mat"]).ids.tolist() == [2, 1, 4, 2]
    assert grown.encode(["mat"]).ids.tolist() == [3]


@pytest.mark.parametrize(
    ("sources", "targets", "message"),
    [
        ((5, 5), (5, 2), "sources: want more rows than the 5 columns.*got 5"),
        ((6, 5), (7, 2), r"targets: want \(n, D\)"),
        ((6,), (6, 2), r"targets: want \(n, D\) for sources \(n, W\) \(6,\)"),
    ],
)
def test_fit_with_wrong_shapes_or_too_few_rows_raises(sources, targets, message):
    with pytest.raises(ValueError, match=message):
        fit_affine(np.zeros(sources), np.zeros(targets))
