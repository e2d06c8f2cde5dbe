"""Equal scores count as the mean over all orders: every figure against sorts in every order of the items."""

import itertools
import math

import numpy as np
import pytest
import torch

from fastqt.sentences.evaluation import (
    LinearMaps,
    evaluate,
    judged,
    mean_classifier,
    ranking_metrics,
    retrieval,
)
from fastqt.sentences.evaluation.classification import accuracy
from fastqt.sentences.metrics import context_accuracy, ranking_figures
from tests.sentences.evaluation.test_judged import write_set
from tests.shared.tolerances import FLOAT64

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Rows of norm 2 or 0, whose products are exact in all dtypes and often equal.
LATTICE = np.array([[2, 0, 0, 0], [0, 2, 0, 0], [0, 0, -2, 0], [1, 1, 1, 1], [1, -1, 1, -1], [0, 0, 0, 0]])


def orders(scores):
    """All orders of items that sort by score: among equal scores the one first that a permutation has first.

    Each permutation of all items is taken, so each order of equal ones comes equally often.
    """
    for priority in itertools.permutations(range(len(scores))):
        yield sorted(range(len(scores)), key=lambda item: (-scores[item], priority[item]))


def ranks(scores, right):
    """The rank of the first right item in each order."""
    return [1 + min(order.index(item) for item in right) for order in orders(list(scores))]


def lattice(generator, rows):
    return LATTICE[generator.integers(len(LATTICE), size=rows)].astype(float)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(4))
def test_metrics_of_trainings(seed, dtype):
    generator = np.random.default_rng(seed)
    q, c, *more = (lattice(generator, 3 if name else 5) for name in (0, 0, 1))
    scores = q @ c.T
    np.fill_diagonal(scores, 0)
    firsts = [[order[0] for order in orders(row)] for row in scores.tolist()]
    forward = sum(np.mean([first == i + 1 for first in each]) for i, each in enumerate(firsts)) / 4
    backward = sum(np.mean([first == i - 1 for first in each]) for i, each in enumerate(firsts)) / 4
    accuracies = context_accuracy(torch.tensor(q, dtype=dtype), torch.tensor(c, dtype=dtype))
    assert accuracies == pytest.approx((forward, backward), rel=FLOAT64)

    q, documents = q[:3], [c[:3], *more]
    cosines = (q / 2) @ (np.concatenate(documents) / 2).T
    each = np.array([ranks(row, [i]) for i, row in enumerate(cosines)])
    figures = ranking_figures(torch.tensor(q, dtype=dtype), [torch.tensor(d, dtype=dtype) for d in documents])
    assert figures["accuracy"] == pytest.approx((each == 1).mean(), rel=FLOAT64)
    assert figures["mrr"] == pytest.approx((1 / each).mean(), rel=FLOAT64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("N", "D"), [(7, 77), (300, 768)])
def test_collapsed_vectors_reach_what_chance_does(N, D, dtype):
    """Though products of equal rows differ in their last bits."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, D, generator=generator).to(dtype).expand(N, D)
    figures = ranking_figures(x, [x, 2 * x])
    assert figures["accuracy"] == pytest.approx(figures["chance"])
    assert figures["mrr"] == pytest.approx(sum(1 / rank for rank in range(1, 2 * N + 1)) / (2 * N))
    # A sentence's score with itself is 0, below those with the N - 1 others.
    assert context_accuracy(x, x) == pytest.approx((1 / (N - 1), 1 / (N - 1)))


def test_what_is_not_a_number_comes_last():
    x = torch.full((5, 3), math.nan)
    assert ranking_figures(x, [x]) == pytest.approx({"accuracy": 0, "mrr": 1 / 5, "chance": 1 / 5})
    assert context_accuracy(x, x) == (0, 0)


def by_order(qrels, order):
    """The figures of one order of documents, in loops over ranks."""
    order = order[:1000]
    wanted = [name for name, relevance in qrels.items() if relevance >= 1]
    gains = [max(qrels.get(name, 0), 0) / math.log2(rank + 2) for rank, name in enumerate(order[:10])]
    best = sorted((max(relevance, 0) for relevance in qrels.values()), reverse=True)[:10]
    ideal = sum(gain / math.log2(rank + 2) for rank, gain in enumerate(best))
    places = [rank for rank, name in enumerate(order, start=1) if name in wanted]
    return {
        "nDCG@10": sum(gains) / ideal,
        "MRR@10": 1 / places[0] if places and places[0] <= 10 else 0,
        "MAP@1000": sum(count / rank for count, rank in enumerate(places, start=1)) / len(wanted),
        **{f"recall@{k}": sum(rank <= k for rank in places) / len(wanted) for k in (1, 10, 100)},
    }


def mean_over_orders(qrels, scores):
    """The mean over all orders of the documents with the lowest score; the others have no equals."""
    lowest = min(scores.values())
    first = sorted((name for name in scores if scores[name] > lowest), key=lambda name: -scores[name])
    tied = [name for name in scores if scores[name] == lowest]
    each = [by_order(qrels, [*first, *order]) for order in itertools.permutations(tied)]
    return {name: np.mean([figures[name] for figures in each]) for name in each[0]}


@pytest.mark.parametrize("before", [0, 1, 7, 97, 997])  # the cuts at 1, 10, 100 and 1,000 are among the tied
@pytest.mark.parametrize("seed", range(3))
def test_figures_of_evaluation(before, seed, tmp_path, monkeypatch):
    """From scores, and from a search, which keeps no more than 1,000 documents."""
    monkeypatch.setattr(judged, "DOCUMENTS", 300)
    generator = np.random.default_rng(seed)
    names = [f"d{n}" for n in generator.permutation(before + 6)]
    scores = dict(zip(names, np.r_[np.linspace(1, -0.4, before), [-0.5] * 6], strict=True))
    qrels = {name: int(generator.integers(-1, 4)) for name in (*names[:before:90], *names[-6:])}
    qrels |= {names[-1]: 1, "missing": 2}
    wanted = mean_over_orders(qrels, scores)
    assert ranking_metrics({"q": qrels}, {"q": scores})["q"] == pytest.approx(wanted, rel=FLOAT64)

    listed = {name: ("", name) for name in sorted(names)}
    rows = [("q", name, relevance) for name, relevance in qrels.items()]
    folder = write_set(tmp_path / "set", listed, {"q": "query"}, rows)

    def encode(texts):  # at the cosine of the score with the query
        cosines = np.array([scores.get(text, 1) for text in texts])
        return np.stack([cosines, np.sqrt(1 - cosines**2)], axis=1)

    figures = evaluate(encode, folder, progress=False).tasks["set"]
    assert {name: figures[name] for name in wanted} == pytest.approx(wanted, rel=FLOAT64)


@pytest.mark.parametrize("seed", range(6))
def test_retrieval_of_images_and_captions(seed, monkeypatch):
    monkeypatch.setattr(retrieval, "BLOCK_ROWS", 2)
    generator = np.random.default_rng(seed)
    images, captions = lattice(generator, 3), lattice(generator, 5)
    owners = np.array([0, 1, 2, *generator.integers(3, size=2)])
    maps = LinearMaps(4, 4, 4)
    for side in (maps.image, maps.caption):
        torch.nn.init.eye_(side.weight)
        torch.nn.init.zeros_(side.bias)

    scores = (images / 2) @ (captions / 2).T
    of_images = [ranks(row, np.flatnonzero(owners == image)) for image, row in enumerate(scores)]
    of_captions = [ranks(row, [owner]) for owner, row in zip(owners, scores.T, strict=True)]
    for reached, each in zip(maps.retrieve(images, captions, owners), (of_images, of_captions), strict=True):
        pooled = np.concatenate(each)
        shares = [(pooled <= limit).mean() for limit in (1, 5, 10)]
        assert reached == pytest.approx((*shares, np.median(pooled)), rel=FLOAT64)


def test_equal_images_and_captions_are_found_by_chance():
    """Also where they are equal but for rounding, and where the maps have diverged."""
    owners = np.array([0, 1, 2, 3, 0, 0])
    wanted = retrieval.chance(owners, 4)
    torch.manual_seed(0)
    for maps, fill in ((LinearMaps(3, 5, 77), 0.3), (LinearMaps(3, 5, 7), 1e38)):
        reached = maps.retrieve(np.full((4, 3), fill), np.full((6, 5), fill), owners)
        assert np.array(reached) == pytest.approx(np.array(wanted))
    assert wanted[1] == (1 / 4, 1, 1, 2.5)


def test_accuracies_of_classifiers():
    scores = np.log([[0.4, 0.4, 0.2], [0.2, 0.4, 0.4], [1 / 3, 1 / 3, 1 / 3], [0.1, 0.1, 0.8]])
    labels = np.array([0, 0, 2, 2])
    firsts = [[order[0] for order in orders(row)] for row in scores.tolist()]
    wanted = np.mean([np.mean(np.array(each) == label) for each, label in zip(firsts, labels, strict=True)])
    assert accuracy(scores, labels) == pytest.approx(wanted, rel=FLOAT64)
    assert (
        mean_classifier(np.ones((6, 3)) / 3, np.arange(6) % 2, np.ones((1, 3)), np.array([0])).accuracy == 0.5
    )
