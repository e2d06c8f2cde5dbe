"""Figures of rankings in which scores are equal, beside all orders and trec_eval's."""

import itertools
import math
import statistics

import numpy as np
import pytest

from fastqt.sentences.evaluation import (
    evaluate,
    judged,
    ranking_metrics,
)
from tests.sentences.evaluation.test_judged import write_set
from tests.shared.tolerances import FLOAT64


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


@pytest.mark.parametrize("before", [0, 1, 7, 97, 997])  # the cuts at 1, 10, 100 and 1,000 are among the tied
@pytest.mark.parametrize("seed", range(3))
def test_rankings_with_equal_scores(before, seed, tmp_path, monkeypatch):
    """From scores, and from a search, which keeps no more than 1,000 documents."""
    monkeypatch.setattr(judged, "DOCUMENTS", 300)
    generator = np.random.default_rng(seed)
    names = [f"d{n}" for n in generator.permutation(before + 6)]
    scores = dict(zip(names, np.r_[np.linspace(1, -0.4, before), [-0.5] * 6], strict=True))
    qrels = {name: int(generator.integers(-1, 4)) for name in (*names[:before:90], *names[-6:])}
    qrels |= {names[-1]: 1, "missing": 2}
    first, tied = names[:before], names[before:]  # The last six have the lowest score, the others no equals.
    each = [by_order(qrels, [*first, *order]) for order in itertools.permutations(tied)]
    wanted = {name: np.mean([figures[name] for figures in each]) for name in each[0]}
    assert ranking_metrics({"q": qrels}, {"q": scores})["q"] == pytest.approx(wanted, rel=FLOAT64)

    listed = {name: ("", name) for name in sorted(names)}
    rows = [("q", name, relevance) for name, relevance in qrels.items()]
    folder = write_set(tmp_path / "set", listed, {"q": "query"}, rows)

    def encode(texts):  # at the cosine of the score with the query
        x = np.array([scores.get(text, 1) for text in texts])
        return np.stack([x, np.sqrt(1 - x**2)], axis=1)

    figures = evaluate(encode, folder, progress=False).tasks["set"]
    assert {name: figures[name] for name in wanted} == pytest.approx(wanted, rel=FLOAT64)


# What trec_eval calls the figures.
TREC = {"nDCG@10": "ndcg_cut_10", "MAP@1000": "map_cut_1000"}
TREC |= {f"recall@{k}": f"recall_{k}" for k in (1, 10, 100)}
# Judgements and scores, and what pytrec_eval-terrier 0.5.11 says of them; the last is the reciprocal rank.
STORED = [
    # the only relevant document comes first
    ({"a": 1}, {"a": 0.9, "b": 0.1}, (1, 1, 1, 1, 1, 1)),
    # grades in the wrong order
    ({"a": 3, "b": 1, "c": 2}, {"b": 0.9, "c": 0.8, "a": 0.7}, (0.7899980042460358, 1, 1 / 3, 1, 1, 1)),
    # one of two relevant documents is missing, another was judged as not relevant
    (
        {"a": 2, "b": -1, "c": 0, "missing": 1},
        {"a": 1.0, "b": 1.2, "d": 1.1, "c": 0.5},
        (0.38009376671593426, 1 / 6, 0, 0.5, 0.5, 1 / 3),
    ),
    # nothing relevant is judged, or found
    ({"a": 0}, {"a": 1.0}, (0, 0, 0, 0, 0, 0)),
    ({"a": 1}, {"b": 1.0}, (0, 0, 0, 0, 0, 0)),
    # the relevant documents have the ranks 2 and 11
    (
        {"b": 1, "k": 1},
        {name: -float(place) for place, name in enumerate("abcdefghijk")},
        (0.38685280723454163, 0.34090909090909094, 0, 0.5, 1, 0.5),
    ),
]


@pytest.mark.parametrize(("judged", "scores", "wanted"), STORED)
def test_figures_are_the_stored_ones_of_trec_eval(judged, scores, wanted):
    found = ranking_metrics({"q": judged}, {"q": scores})["q"]
    assert [found[name] for name in (*TREC, "MRR@10")] == pytest.approx(wanted, abs=1e-12)


def test_figures_of_equal_scores_are_the_mean_of_trec_eval_over_names():
    """trec_eval sorts equal scores by the documents' names, so each renaming is another order of them."""
    pytrec_eval = pytest.importorskip("pytrec_eval", reason="pytrec_eval is not installed")
    relevances, scores, each = (2, 0, 1, 0, 1), (0.5, 0.5, 0.5, 0.5, 0.25), []
    for names in itertools.permutations("abcde"):
        qrels, run = ({"q": dict(zip(names, values, strict=True))} for values in (relevances, scores))
        evaluator = pytrec_eval.RelevanceEvaluator(qrels, {"ndcg_cut.10", "map_cut.1000", "recall.1,10,100"})
        each.append(evaluator.evaluate(run)["q"])
        ours = ranking_metrics(qrels, run)["q"]
    for name, trec in TREC.items():
        assert ours[name] == pytest.approx(statistics.mean(x[trec] for x in each), abs=1e-12), name


def test_queries_that_were_not_searched_and_scores_that_are_no_numbers():
    found = ranking_metrics({"q": {"a": 1}}, {"other": {"a": 1.0}})
    assert list(found) == ["q"]
    assert set(found["q"].values()) == {0.0}
    with pytest.raises(ValueError, match="run: want numbers as scores, got NaN for the query 'q'"):
        ranking_metrics({"q": {"a": 1}}, {"q": {"a": float("nan")}})
