"""Figures of rankings against trec_eval's numbers and trec_eval itself, which has one order of equal scores.

tests/sentences/test_ties.py compares the figures of equal scores with their means over all orders.
"""

import itertools
import random
import statistics

import pytest

from fastqt.sentences.evaluation import ranking_metrics

# What trec_eval calls the figures.
TREC = {
    "nDCG@10": "ndcg_cut_10",
    "MAP@1000": "map_cut_1000",
    "recall@1": "recall_1",
    "recall@10": "recall_10",
    "recall@100": "recall_100",
}


def draw(seed):
    """Judgements and a run with grades, and documents that were not judged or not found."""
    generator = random.Random(seed)
    documents = [f"d{number}" for number in range(generator.choice((5, 30, 1500)))]
    qrels, run = {}, {}
    for query in ("q1", "q2", "q3"):
        judged = generator.sample(documents, min(len(documents), generator.choice((1, 4, 40))))
        grades = generator.choice(((0, 1), (0, 1, 2, 3), (-1, 0, 5), (0,)))
        qrels[query] = {document: generator.choice(grades) for document in judged}
        qrels[query] |= {f"missing{number}": 1 for number in range(generator.randint(0, 2))}
        found = generator.sample(documents, generator.randint(0, len(documents)))
        scores = generator.sample(range(10**6), len(found))  # no two are equal
        run[query] = {document: score / 1024 for document, score in zip(found, scores, strict=True)}
    return qrels, run


# Judgements and scores, and what pytrec_eval-terrier 0.5.11 says of them; the last is the reciprocal rank.
STORED = [
    # the only relevant document comes first
    ({"a": 1}, {"a": 0.9, "b": 0.1}, (1.0, 1.0, 1.0, 1.0, 1.0, 1.0)),
    # grades in the wrong order
    (
        {"a": 3, "b": 1, "c": 2},
        {"b": 0.9, "c": 0.8, "a": 0.7},
        (0.7899980042460358, 1.0, 0.3333333333333333, 1.0, 1.0, 1.0),
    ),
    # one of two relevant documents is missing, another was judged as not relevant
    (
        {"a": 2, "b": -1, "c": 0, "missing": 1},
        {"a": 1.0, "b": 1.2, "d": 1.1, "c": 0.5},
        (0.38009376671593426, 0.16666666666666666, 0.0, 0.5, 0.5, 0.3333333333333333),
    ),
    # nothing relevant is judged, or found
    ({"a": 0}, {"a": 1.0}, (0.0, 0.0, 0.0, 0.0, 0.0, 0.0)),
    ({"a": 1}, {"b": 1.0}, (0.0, 0.0, 0.0, 0.0, 0.0, 0.0)),
    # the relevant documents have the ranks 2 and 11
    (
        {"b": 1, "k": 1},
        {name: -float(place) for place, name in enumerate("abcdefghijk")},
        (0.38685280723454163, 0.34090909090909094, 0.0, 0.5, 1.0, 0.5),
    ),
]


@pytest.mark.parametrize(("judged", "scores", "wanted"), STORED)
def test_figures_are_the_stored_ones_of_trec_eval(judged, scores, wanted):
    found = ranking_metrics({"q": judged}, {"q": scores})["q"]
    names = ("nDCG@10", "MAP@1000", "recall@1", "recall@10", "recall@100", "MRR@10")
    assert [found[name] for name in names] == pytest.approx(wanted, abs=1e-12)


def test_figures_are_those_of_trec_eval():
    pytrec_eval = pytest.importorskip("pytrec_eval", reason="pytrec_eval is not installed")
    wanted = {"ndcg_cut.10", "map_cut.1000", "recall.1,10,100", "recip_rank"}
    for seed in range(200):
        qrels, run = draw(1000 + seed)
        theirs = pytrec_eval.RelevanceEvaluator(qrels, wanted).evaluate(run)
        ours = ranking_metrics(qrels, run)
        for query, figures in ours.items():
            expected = {name: theirs[query][trec] for name, trec in TREC.items()}
            rank = theirs[query]["recip_rank"]
            expected["MRR@10"] = rank if rank >= 0.1 else 0  # trec_eval has no cut of the reciprocal rank
            assert figures == pytest.approx(expected, abs=1e-12), (seed, query)


def test_figures_of_equal_scores_are_the_mean_of_trec_eval_over_names():
    """trec_eval sorts equal scores by the documents' names, so each renaming is another order of them."""
    pytrec_eval = pytest.importorskip("pytrec_eval", reason="pytrec_eval is not installed")
    relevances, scores, theirs = (2, 0, 1, 0, 1), (0.5, 0.5, 0.5, 0.5, 0.25), []
    for names in itertools.permutations("abcde"):
        qrels, run = ({"q": dict(zip(names, values, strict=True))} for values in (relevances, scores))
        evaluator = pytrec_eval.RelevanceEvaluator(qrels, {"ndcg_cut.10", "map_cut.1000", "recall.1,10,100"})
        theirs.append(evaluator.evaluate(run)["q"])
        ours = ranking_metrics(qrels, run)["q"]
    for name, trec in TREC.items():
        assert ours[name] == pytest.approx(statistics.mean(each[trec] for each in theirs), abs=1e-12), name


def test_queries_that_were_not_searched_count_nothing_and_others_are_left_out():
    found = ranking_metrics({"q": {"a": 1}}, {"other": {"a": 1.0}})
    assert list(found) == ["q"]
    assert set(found["q"].values()) == {0.0}


def test_scores_that_are_not_numbers_are_refused():
    with pytest.raises(ValueError, match="run: want numbers as scores, got NaN for the query 'q'"):
        ranking_metrics({"q": {"a": 1}}, {"q": {"a": float("nan")}})
