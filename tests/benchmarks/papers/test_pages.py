"""Curves, claims and tables of the papers' page follow from the stored runs alone."""

import pytest

from benchmarks.papers import claims, gloss_pages, pages, store
from benchmarks.papers.gloss_pages import SOURCE, figures, gloss_ordering
from benchmarks.papers.pages import CLASSIFICATION
from benchmarks.papers.runs import STS


@pytest.fixture
def nothing_stored(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "STORED", tmp_path)
    return tmp_path


def test_labels_that_are_needed(nothing_stored):
    curves = {
        "bag of words before training": [0.5, 0.5, 0.5, 0.6, 0.7],
        "mean of GloVe": [0.5, 0.69, 0.7, 0.8, 0.9],
        "bag of words from GloVe": [0.5, 0.5, 0.5, 0.6, 0.69],
    }
    for system, accuracies in curves.items():
        by_size = dict(zip(("8", "32", "128", "512", "2048"), accuracies, strict=True))
        record = {"accuracies": {size: [x - 0.01, x + 0.01] for size, x in by_size.items()}}
        store.add("few-labels", f"SUBJ, {system}", record)
    (row,) = claims.few_labels_needed().splitlines()[2:]
    assert row == "| SUBJ | 70.0 | 128 | more | – | – |"


def test_what_more_text_changes(nothing_stored):
    def record(accuracies, spearman):
        tasks = dict(zip(CLASSIFICATION, ({"accuracy": x} for x in accuracies), strict=True))
        tasks |= {task: {"all": {"spearman": spearman}} for task in STS if task != "STSB"}
        return {"tasks": tasks | {"STSB": {"test": {"spearman": spearman}}}}

    store.add("limited-text", "1-seed0", record([0.5] * 6, 0.3))
    store.add("limited-text", "10-seed0", record([0.6] * 4 + [0.4] * 2, 0.35))
    store.add("limited-text", "100-seed1", record([0.9] * 6, 0.9))
    (row,) = claims.more_text().splitlines()[2:]
    assert row == "| 1 % to 10 % | of the text | 4 of 6 | +3.3 | +5.0 | 1 |"


def test_what_training_changes_for_the_mean_classifier(nothing_stored):
    def record(means, logistic):
        of_form = {"means": means, "centred": 0.7, "logistic": logistic}
        return {"tasks": {task: {"unit": of_form} for task in pages.LOSSES_TASKS}}

    for seed, means in ((0, 0.5), (1, 0.6)):
        store.add("mean-classifier", f"before training, seed {seed}", record(means, 0.8))
        store.add("mean-classifier", f"QuickThoughts, seed {seed}", record(means + 0.1, 0.9))
    rows = claims.mean_classifier_claims().splitlines()[2:]
    assert rows == [
        "| before training | means | – | – | 25.0 |",
        "| before training | means, centred | – | – | 10.0 |",
        "| QuickThoughts | means | 4 of 4 | +10.0 | 25.0 |",
        "| QuickThoughts | means, centred | 0 of 4 | +0.0 | 20.0 |",
    ]


def record(*values):
    """A stored run with these per cent of CR, TREC, STS13, STS15 and STS-B."""
    cr, trec, sts13, sts15, stsb = (value / 100 for value in values)
    similar = {"STS13": {"all": {"pearson": sts13}}, "STS15": {"all": {"pearson": sts15}}}
    return {
        "tasks": {
            **{"CR": {"accuracy": cr}, "TREC": {"accuracy": trec}},
            **similar,
            "STSB": {"dev": {"pearson": 0.0}, "test": {"pearson": stsb}},
        }
    }


def test_differences_of_the_source_are_those_of_its_tables(monkeypatch):
    known = {f"{decoder}-{d}": record(*values) for (decoder, d), values in SOURCE.items()}
    monkeypatch.setattr(
        gloss_pages, "stored", lambda table: {**known, "mean of GloVe": record(1, 1, 1, 1, 1)}
    )
    assert figures(known["bow-100"]) == pytest.approx(SOURCE["bow", 100])
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in gloss_ordering().splitlines()[2:]]
    assert len(rows) == 8
    assert all(source == ours for _, source, ours in rows), "ours are the source's here"
    found = {title: source for title, source, _ in rows}
    # (77.85 - 76.35) of CR and TREC; (67.03 - 65.13) of the three STS tasks.
    assert found["d=300: supervised, positions − bags"] == "+1.5"
    assert found["bags of words: STS, d=300 − d=100"] == "+1.9"
