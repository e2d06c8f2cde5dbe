"""The paired bootstrap of MixCSE against SimCSE: its coefficients, that it is paired, and what it stores."""

import zlib

import numpy as np
import pytest
from scipy import stats

from benchmarks.papers import bootstrap, pages, store
from benchmarks.papers.bootstrap import Comparison, draws, mean_of_tasks, spearmans
from benchmarks.papers.parts import NotReadyError
from benchmarks.papers.plans import SEEDS
from benchmarks.papers.runs import STS, Places
from fastqt.sentences.evaluation import evaluate
from fastqt.sentences.evaluation.encoders import NamedEncoder
from tests.shared.tolerances import FLOAT64

PAIRS = {"A": 40, "B": 25}


@pytest.fixture
def gold():
    generator = np.random.default_rng(0)
    return {task: generator.integers(0, 6, size=n) / 2 for task, n in PAIRS.items()}  # with many ties


def noisy(gold, noise, seed):
    generator = np.random.default_rng(seed)
    return {task: g + noise * generator.standard_normal(len(g)) for task, g in gold.items()}


def test_each_resample_has_the_coefficient_that_scipy_computes(gold):
    scores, rows = noisy(gold, 2, seed=1), draws(PAIRS, 30, seed=2)
    found = spearmans(scores["A"].round(), gold["A"], rows["A"])
    wanted = [stats.spearmanr(scores["A"].round()[row], gold["A"][row])[0] for row in rows["A"]]
    assert found == pytest.approx(100 * np.array(wanted), rel=FLOAT64)


def test_a_constant_side_has_the_coefficient_0():
    rows = np.arange(5)[None]
    assert spearmans(np.ones(5), np.arange(5.0), rows) == [0]
    assert spearmans(np.arange(5.0), np.ones(5), rows) == [0]


def test_both_losses_have_the_same_resamples(gold):
    # A rising function of the cosines changes no rank, so resamples of the same pairs do not differ.
    scores, rows = noisy(gold, 2, seed=1), draws(PAIRS, 50, seed=0)
    risen = {task: np.exp(x) for task, x in scores.items()}
    assert (mean_of_tasks(scores, gold, rows) == mean_of_tasks(risen, gold, rows)).all()
    other = draws(PAIRS, 50, seed=1)
    assert (mean_of_tasks(scores, gold, rows) != mean_of_tasks(risen, gold, other)).any()


def test_pairs_are_drawn_with_replacement_within_their_task():
    rows = draws(PAIRS, 20, seed=0)
    assert {task: row.shape for task, row in rows.items()} == {"A": (20, 40), "B": (20, 25)}
    for task, n in PAIRS.items():
        assert rows[task].min() >= 0
        assert rows[task].max() < n
        assert all(len(set(row.tolist())) < n for row in rows[task])


# Everything from here on: three seeds of two losses, with encoders that are known.


def encoder_of(noise, seed):
    """Sentences of one number are near each other; `noise` moves each sentence."""

    def encode(texts):
        vectors = []
        for text in texts:
            angle = int(text.split()[0]) / 10
            own = np.random.default_rng([zlib.crc32(text.encode()), seed]).standard_normal(2)
            vectors.append(np.array([np.cos(angle), np.sin(angle)]) + noise * own)
        return np.array(vectors)

    return encode


@pytest.fixture
def places(tmp_path, monkeypatch):
    """STS tasks in which the numbers of two sentences say how near they are, and stored runs."""
    monkeypatch.setattr(store, "STORED", tmp_path / "stored")
    generator = np.random.default_rng(0)
    (tmp_path / "eval/STSB").mkdir(parents=True)
    (tmp_path / "eval/STS").mkdir()
    for path in [*(f"STS/{task}" for task in STS if task != "STSB"), "STSB/dev", "STSB/test"]:
        first, second = generator.integers(0, 15, size=(2, 60))
        lines = [
            f"s{row % 2}\t{5 - abs(a - b) / 3:.2f}\t{a} x{row}\t{b} y{row}\n"
            for row, (a, b) in enumerate(zip(first, second, strict=True))
        ]
        (tmp_path / "eval" / f"{path}.tsv").write_text("".join(lines))
    encoders = {}
    for loss, noise in (("simcse", 0.6), ("mixcse-0.2", 0.05), ("released", 0.6)):
        for seed in SEEDS:
            key = f"{loss}-seed{seed}"
            encoders[key] = NamedEncoder(encoder_of(noise, seed), key)
            tasks = evaluate(encoders[key].encode, tmp_path / "eval", STS, progress=False).tasks
            store.add("views-minilm", key, {"sha256": key, "tasks": tasks})
            (tmp_path / "work/views-minilm" / key).mkdir(parents=True)
    monkeypatch.setattr(bootstrap, "load_encoder", lambda folder: encoders[folder.rpartition("/")[2]])
    return Places(tmp_path, tmp_path / "work")


def test_a_loss_that_is_better_has_an_interval_above_0(places):
    record = Comparison("minilm", "mixcse-0.2", resamples=100).perform(places)
    low, high = record["interval"]
    assert 0 < low < record["difference"] < high
    assert low < record["mean_of_resamples"] < high
    assert record["difference"] == pytest.approx(np.mean(record["difference_of_seeds"]))
    assert len(record["difference_of_seeds"]) == len(SEEDS)
    assert len(record["sha256"]) == 2 * len(SEEDS)
    assert Comparison("minilm", "released", resamples=100).perform(places)["interval"] == [0, 0]


def test_vectors_that_an_evaluation_kept_are_not_made_again(places, monkeypatch):
    comparison = Comparison("minilm", "mixcse-0.2", resamples=20)
    first = comparison.perform(places)
    assert len(list(places.vectors.iterdir())) == 2 * len(SEEDS)

    def same_model(folder):
        return NamedEncoder(lambda texts: pytest.fail("encoded again"), folder.rpartition("/")[2])

    monkeypatch.setattr(bootstrap, "load_encoder", same_model)
    assert comparison.perform(places)["interval"] == first["interval"]


def test_cosines_that_do_not_give_the_stored_figure_are_refused(places):
    record = store.stored("views-minilm")["simcse-seed1"]
    record["tasks"]["STS13"]["all"]["spearman"] -= 0.01
    store.add("views-minilm", "simcse-seed1", record)
    with pytest.raises(RuntimeError, match=r"simcse-seed1: STS13 differs from the stored figure by 1\.0"):
        Comparison("minilm", "mixcse-0.2", resamples=20).perform(places)


def test_what_is_missing_is_named(places):
    with pytest.raises(NotReadyError, match=r"mixcse-0\.1-seed0 of the table views-minilm is not stored yet"):
        Comparison("minilm", "mixcse-0.1").perform(places)
    store.add("views-minilm", "simcse-seed0", {**store.stored("views-minilm")["simcse-seed0"], "sha256": "x"})
    with pytest.raises(NotReadyError, match="not the one whose figures are stored"):
        Comparison("minilm", "mixcse-0.2").perform(places)
    (places.work / "views-minilm" / "simcse-seed0").rmdir()
    with pytest.raises(NotReadyError, match="is not there"):
        Comparison("minilm", "mixcse-0.2").perform(places)


def test_the_table_has_what_is_stored(places):
    assert pages.bootstrap_table("minilm") == pages.NOT_STORED
    for form in ("mixcse-0.2", "released"):
        comparison = Comparison("minilm", form, resamples=50)
        store.add("bootstrap", comparison.name, comparison.perform(places))
    lines = pages.bootstrap_table("minilm").splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| `mixcse-0.2`", "| `released`"]
    assert lines[2].endswith("| yes |")
    assert lines[3].endswith("| not decided |")
    assert pages.bootstrap_table("masked-words") == pages.NOT_STORED
