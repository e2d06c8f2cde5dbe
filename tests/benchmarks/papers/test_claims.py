"""What is said of the sources' claims follows from the stored parts."""

import pytest

from benchmarks.papers import claims, pages, store
from benchmarks.papers.runs import CLASSIFICATION, STS


@pytest.fixture(autouse=True)
def stored(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "STORED", tmp_path)


@pytest.mark.parametrize("section", claims.SECTIONS)
def test_nothing_is_claimed_of_nothing(section):
    assert claims.SECTIONS[section]() == pages.NOT_STORED


def test_labels_that_are_needed():
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


def test_what_more_text_changes():
    def record(accuracies, spearman):
        tasks = dict(zip(CLASSIFICATION, ({"accuracy": x} for x in accuracies), strict=True))
        tasks |= {task: {"all": {"spearman": spearman}} for task in STS if task != "STSB"}
        return {"tasks": tasks | {"STSB": {"test": {"spearman": spearman}}}}

    store.add("limited-text", "1-seed0", record([0.5] * 6, 0.3))
    store.add("limited-text", "10-seed0", record([0.6] * 4 + [0.4] * 2, 0.35))
    store.add("limited-text", "100-seed1", record([0.9] * 6, 0.9))
    (row,) = claims.more_text().splitlines()[2:]
    assert row == "| 1 % to 10 % | of the text | 4 of 6 | +3.3 | +5.0 | 1 |"


def test_what_training_changes_for_the_mean_classifier():
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
