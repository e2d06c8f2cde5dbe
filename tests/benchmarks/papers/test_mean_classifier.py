"""CURL's mean classifier: the losses that train, and what classifies."""

import numpy as np
import pytest
import torch
from torch.nn.functional import softplus

from benchmarks.papers import mean_classifier, pages, store
from benchmarks.papers.mean_classifier import LOSSES, Learnt, Task, classified, pairs_loss
from benchmarks.papers.runs import Places
from fastqt.sentences.evaluation.classification import split
from fastqt.sentences.text import Batch, Position
from tests.shared.tolerances import FLOAT32


@pytest.fixture
def batch():
    documents = torch.tensor([0, 0, 0, 1, 2, 2, 2, 2, 2, 2])
    return Batch(torch.zeros(10, 1, dtype=torch.long), torch.ones(10), documents, Position())


def test_pairs_are_the_next_sentences_of_a_document(batch):
    vectors = torch.randn(10, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    pairs = [(0, 1), (1, 2), (4, 5), (5, 6), (6, 7), (7, 8), (8, 9)]
    others = torch.randint(10, (7,), generator=torch.Generator().manual_seed(3)).tolist()
    wanted = sum(
        softplus(-vectors[i] @ (vectors[j] - vectors[other]))
        for (i, j), other in zip(pairs, others, strict=True)
    ) / len(pairs)
    found = pairs_loss(vectors, batch, torch.Generator().manual_seed(3))
    torch.testing.assert_close(found, wanted, rtol=FLOAT32, atol=FLOAT32)
    (gradient,) = torch.autograd.grad(found, vectors)
    (wanted_gradient,) = torch.autograd.grad(wanted, vectors)
    torch.testing.assert_close(gradient, wanted_gradient, rtol=FLOAT32, atol=FLOAT32)
    assert gradient[3].any() == (3 in others), "a document of one sentence is a negative alone"


@pytest.mark.parametrize("loss", [name for name, loss in LOSSES.items() if loss is not None])
def test_each_loss_trains_the_one_encoder(loss, batch):
    vectors = torch.randn(10, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    value = LOSSES[loss](
        vectors, batch._replace(document_ids=torch.zeros(10, dtype=torch.long)), torch.Generator()
    )
    value.backward()
    assert value > 0
    assert vectors.grad.any(dim=1).sum() >= 8


@pytest.fixture
def task():
    """Two classes about (3, 3) and (4, 4), of which the second has three quarters of the rows."""
    labels = (np.arange(80) % 4 > 0).astype(np.int64)
    return Task([], labels, split(labels, 10, 0))


def vectors_of(task):
    centre = np.array([[3.0, 3], [4, 4]])[task.labels]
    return (centre + 0.1 * np.random.default_rng(0).standard_normal(centre.shape)).astype(np.float32)


def test_means_find_no_class_that_differs_in_its_length_alone(task):
    # All vectors point the same way, and the longer mean always has the larger score.
    found = classified(vectors_of(task), task)
    assert found["means"] == pytest.approx((task.labels == 1).mean(), abs=0.02)
    assert found["centred"] == found["few_centred"] == found["logistic"] == 1
    assert set(found) == {"logistic", "means", "loss", "centred", "few", "few_centred"}


def test_test_rows_do_not_change_the_means(task):
    one_fold = task._replace(tests=task.tests[:1])
    vectors = vectors_of(task)
    before = classified(vectors, one_fold)
    far = vectors.copy()
    far[np.flatnonzero(task.tests[0])[0]] = (1000, -1000)
    after = classified(far, one_fold)
    tested = task.tests[0].sum()
    for name in ("means", "centred", "few_centred"):
        assert abs(before[name] - after[name]) <= 1 / tested + 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
def test_a_part_is_made_twice_with_the_same_result(loss, tmp_path, monkeypatch):
    generator = np.random.default_rng(0)
    words = [f"word{n}" for n in range(30)]
    text = "\n".join(" ".join(generator.choice(words, 5)) for _ in range(4000))
    labelled = "\n".join(f"{row % 2}\t{' '.join(generator.choice(words, 5))}" for row in range(60))
    for path, lines in (("corpus/train.txt", text), ("eval/MR/all.tsv", labelled)):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text(lines + "\n")
    np.savez(
        tmp_path / "vectors.npz", words=words, vectors=generator.standard_normal((30, 6), dtype=np.float32)
    )
    settings = {**mean_classifier.SETTINGS, "steps": 10, "vectors": "@data/vectors.npz"}
    monkeypatch.setattr(mean_classifier, "SETTINGS", settings)
    monkeypatch.setattr(mean_classifier, "CORPUS", "@data/corpus/train.txt")
    monkeypatch.setattr(mean_classifier, "TASKS", ("MR",))
    places = Places(tmp_path, tmp_path / "work")
    first, again, other = (Learnt(loss, seed).perform(places) for seed in (0, 0, 1))
    assert first["sha256"] == again["sha256"]
    assert first["tasks"] == again["tasks"]
    assert [line["step"] for line in first["log"]] == (
        [] if loss == "before training" else list(range(1, 11))
    )
    if loss == "CURL, pairs":
        assert first["sha256"] != other["sha256"], "the seed draws the negatives"


def test_the_table_shows_both_classifiers(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "STORED", tmp_path)
    assert pages.mean_classifier_table() == pages.NOT_STORED
    names = ("logistic", "means", "loss", "centred", "few", "few_centred")
    for seed in (0, 1):
        of_form = {name: place / 10 + seed / 100 for place, name in enumerate(names)}
        tasks = {"MR": {"raw": dict.fromkeys(names, 0.0), "unit": of_form}}
        store.add("mean-classifier", f"CURL, pairs, seed {seed}", {"tasks": tasks})
    (row,) = pages.mean_classifier_table().splitlines()[2:]
    assert row == "| MR | CURL, pairs | 10.5 ± 0.7 | 30.5 ± 0.7 | 40.5 ± 0.7 | 50.5 ± 0.7 | 0.5 ± 0.7 | 2 |"
