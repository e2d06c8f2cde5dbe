"""The curves over numbers of labels: what is held out, what they store, and how they are shown."""

import numpy as np
import pytest

from benchmarks.papers import few_labels, pages, store
from benchmarks.papers.few_labels import SYSTEMS, FewLabels, curve, labelled
from benchmarks.papers.runs import Places
from fastqt.sentences.evaluation.encoders import NamedEncoder


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Sentences of two classes, three quarters of them of one, and an encoder that tells them apart."""
    monkeypatch.setattr(store, "STORED", tmp_path / "stored")
    lines = [f"{'pos' if row % 4 else 'neg'}\tsentence {row}\n" for row in range(200)]
    (tmp_path / "eval/MR").mkdir(parents=True)
    (tmp_path / "eval/MR/all.tsv").write_text("".join(lines))
    generator = np.random.default_rng(0)
    noise = dict(enumerate(generator.standard_normal((200, 3))))

    def encode(texts):
        rows = [int(text.split()[1]) for text in texts]
        return np.array([noise[row] + 4 * (row % 4 > 0) for row in rows])

    monkeypatch.setattr(few_labels, "load", lambda name, places: NamedEncoder(encode, "key"))
    return Places(tmp_path, tmp_path / "work")


def small(system="mean of GloVe"):
    return FewLabels(system, "MR", sizes=(8, 32), draws=2, tested=100)


def test_labels_are_class_numbers(places):
    texts, labels = labelled(places, "MR")
    assert texts[4] == "sentence 4"
    assert labels[:5].tolist() == [0, 1, 1, 1, 0]  # "neg" comes before "pos"


def test_a_curve_has_an_accuracy_for_each_draw(places):
    record = small().perform(places)
    assert record["sha256"] == "key"
    assert {size: len(found) for size, found in record["accuracies"].items()} == {"8": 2, "32": 2}
    assert min(record["accuracies"]["32"]) > 0.85
    # 100 sentences are tested, so that an accuracy is a multiple of 1 / 100.
    assert np.allclose(np.array(record["accuracies"]["8"]) * 100 % 1, 0)
    assert record["accuracies"] == small().perform(places)["accuracies"]


def test_all_systems_have_the_same_draws(places):
    # The encoder is the same for every name here.
    first, second = (small(system).perform(places)["accuracies"] for system in list(SYSTEMS)[:2])
    assert first == second


def test_no_tested_sentence_is_drawn(places, monkeypatch):
    taken = {}

    def recorded(features, labels, tested, test_labels, sizes, **options):
        taken["rest"], taken["tested"] = features, tested
        return {}

    monkeypatch.setattr(few_labels, "limited_data", recorded)
    small().perform(places)
    assert len(taken["rest"]) == len(taken["tested"]) == 100
    both = {tuple(row) for part in taken.values() for row in part.tolist()}
    assert len(both) == 200


def test_the_table_has_mean_and_deviation(places):
    assert pages.few_labels_table() == pages.NOT_STORED
    record = {"accuracies": {"8": [0.5, 0.6, 0.7], "32": [0.8, 0.8, 0.8]}}
    found = curve(record)
    assert found[8] == pytest.approx((60, 10))
    assert found[32] == pytest.approx((80, 0), abs=1e-9)
    store.add("few-labels", "MR, mean of GloVe", record)
    assert pages.few_labels_table().splitlines()[2] == "| MR | mean of GloVe | 60.0 ± 10.0 | 80.0 ± 0.0 |"
