"""A step of SimCSE or MixCSE equals its formula in numpy, whatever options of the loss are given."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fastqt.errors import InputError
from fastqt.sentences.inference.encoder import SentenceEncoder
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.runs.model import build_model
from fastqt.sentences.text import Corpus, Vocabulary
from fastqt.sentences.train import train
from tests.shared.pairs_of_texts import columns_of, write_rows, write_teacher
from tests.shared.rank_pool import Pool
from tests.shared.trained_on_ranks import Seen, trained

SMALL = {
    "keep_checkpoint": True,
    "encoder": "transformer",
    "word_dim": 12,
    "layers": 1,
    "heads": 3,
    "feedforward": 16,
}
SMALL |= {"dropout": 0.0, "batch_size": 48, "report_every": 1, "clip": 0.0}


def metrics(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["step"]]  # without that of fresh weights


def unit(x):
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def log_mean_exp_loss(columns, positives):
    most = columns.max(axis=1)
    return np.mean(most + np.log(np.exp(columns - most[:, None]).sum(axis=1)) - positives)


def loss_and_mixed_cosine(z, partners, *, form, scale, blocks="both", masked_cell="zero", weight=0.0):
    """The loss in float64 of equal views z, and the mean cosine of a row with its mixture."""
    own, rows = unit(z), np.arange(len(z))
    first = scale * own @ own.T
    mixable = own if form == "slides" else z
    m = unit(0.2 * mixable + 0.8 * mixable[partners])
    mixed = (own * m).sum(axis=1)
    if form == "slides":
        columns = np.concatenate([first, scale * mixed[:, None]], axis=1)
        return log_mean_exp_loss(columns, first[rows, rows]), mixed.mean()
    second, third = scale * own @ m.T, scale * m @ own.T
    value = 0.0 if masked_cell == "zero" else -np.inf
    second[partners, rows] = third[rows, partners] = value
    second[rows, rows] += weight
    third[rows, rows] += weight
    columns = np.concatenate([first, second, third] if blocks == "both" else [first, second], axis=1)
    return log_mean_exp_loss(columns, first[rows, rows]), mixed.mean()


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({"form": "slides", "scale": 7.0}, {}),
        ({"form": "slides", "partner": "random", "stop_gradient": "no"}, {}),
        ({"form": "released"}, {}),
        (
            {"form": "released", "partner": "random", "hard_negative_weight": 0.7, "masked_cell": "exclude"},
            {"masked_cell": "exclude", "weight": 0.7},
        ),
        ({"form": "released", "blocks": "candidates", "scale": 5.0}, {"blocks": "candidates"}),
    ],
    ids=str,
)
def test_a_step_logs_the_loss_and_the_mixtures_of_the_partners_that_it_drew(
    planted, tmp_path, monkeypatch, settings, options
):
    drawn = []
    genuine = torch.randperm
    monkeypatch.setattr(
        torch, "randperm", lambda *args, **more: drawn.append(genuine(*args, **more)) or drawn[-1]
    )
    config = TrainConfig((planted[0],), model="mixcse", **SMALL, **settings, steps=1)
    train(config, tmp_path / "run")
    vocabulary = Vocabulary.load(tmp_path / "run" / "vocabulary.json")
    torch.manual_seed(config.seed)
    model = build_model(config, len(vocabulary)).double()
    corpus = Corpus([planted[0]], vocabulary)
    sample = corpus.sample(corpus.order(seed=0, epoch=0)[:48])
    z = model(sample.tokens, sample.lengths)[0].detach().numpy()
    partners = (np.arange(48) + 1) % 48
    if config.partner == "random":
        order = drawn[0].numpy()
        partners[order] = np.roll(order, -1)
    loss, mixed = loss_and_mixed_cosine(z, partners, form=config.form, scale=config.scale, **options)
    line = metrics(tmp_path / "run")[0]
    assert line["loss"] == pytest.approx(loss, rel=1e-5)
    assert line["mixed_cosine"] == pytest.approx(mixed, rel=1e-5)


@pytest.fixture(scope="module")
def pool():
    pool = Pool(2)
    yield pool
    pool.close()


def on_two_ranks(pool, config, out):
    for answer in pool.run(2, trained, config, out):
        assert isinstance(answer, Seen), answer


@pytest.mark.parametrize("form", ["slides", "released"])
def test_ranks_log_the_mixtures_with_partners_on_the_first_rank(planted, tmp_path, monkeypatch, pool, form):
    drawn, genuine = [], torch.randperm
    monkeypatch.setattr(
        torch, "randperm", lambda *args, **more: drawn.append(genuine(*args, **more)) or drawn[-1]
    )
    config = TrainConfig((planted[0],), model="mixcse", **SMALL, form=form, partner="random", steps=1)
    on_two_ranks(pool, replace(config, batch_size=24), tmp_path / "two")
    train(config, tmp_path / "one")
    ours, theirs = (metrics(tmp_path / run)[0] for run in ("two", "one"))
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    order = drawn[0].numpy()
    partners = np.empty(48, dtype=int)
    partners[order] = np.roll(order, -1)
    here = np.flatnonzero(partners[:24] < 24)
    assert 0 < len(here) < 24
    vocabulary = Vocabulary.load(tmp_path / "two" / "vocabulary.json")
    torch.manual_seed(config.seed)
    model = build_model(config, len(vocabulary)).double()
    corpus = Corpus([planted[0]], vocabulary)
    sample = corpus.sample(corpus.order(seed=0, epoch=0)[:48])
    z = model(sample.tokens, sample.lengths)[0].detach().numpy()
    mixable = unit(z) if form == "slides" else z
    mixed = unit(0.2 * mixable[here] + 0.8 * mixable[partners[here]])
    assert ours["mixed_cosine"] == pytest.approx((unit(z)[here] * mixed).sum(axis=1).mean(), rel=1e-5)


def test_the_scale_reaches_the_loss_of_simcse(planted, tmp_path):
    losses = []
    for scale in (20.0, 1e-6):
        config = TrainConfig((planted[0],), model="simcse", **SMALL, scale=scale, steps=1)
        train(config, tmp_path / str(scale))
        losses.append(metrics(tmp_path / str(scale))[0]["loss"])
    assert losses[0] != losses[1] == pytest.approx(np.log(48), rel=1e-5)


def test_random_partners_are_the_same_after_a_pause(planted, tmp_path):
    config = TrainConfig((planted[0],), model="mixcse", **SMALL, partner="random", form="released")
    train(config, tmp_path / "whole")
    for steps in (4, None):
        settings = {} if steps is None else {"steps": steps}
        train(TrainConfig(**{**vars(config), **settings}), tmp_path / "parts", resume=True)
    one, other = (
        [(line["loss"], line["mixed_cosine"]) for line in metrics(tmp_path / run)]
        for run in ("whole", "parts")
    )
    assert one == other


@pytest.fixture
def rows(tmp_path):
    """Paths of pairs, of rows with two hard negatives, and of held-out rows with two."""
    paths = {}
    for name, count, columns in (("pairs", 100, 2), ("hard", 100, 4), ("held", 60, 4)):
        lines = []
        for n in range(count):
            topic = n % 25
            texts = [f"s{n} topic{topic} place{n % 7}", f"topic{topic} place{n % 5}"]
            texts += [f"topic{(topic + 1) % 25} other{n % 3}", f"place{n % 7} topic{(topic + 2) % 25}"]
            lines.append("\t".join(texts[:columns]))
        paths[name] = str(tmp_path / f"{name}.tsv")
        Path(paths[name]).write_text("\n".join(lines) + "\n")
    return paths


@pytest.mark.parametrize(
    ("name", "model", "settings"),
    [
        ("pairs", "simcse", {}),
        ("hard", "simcse", {}),
        ("hard", "simcse", {"hard_negative_weight": 1.5, "scale": 7.0}),
        ("pairs", "mixcse", {}),
    ],
)
def test_a_step_on_rows_of_texts_agrees_with_the_formula(rows, tmp_path, name, model, settings):
    config = TrainConfig((rows[name],), model=model, **SMALL | {"batch_size": 100}, **settings, steps=1)
    train(config, tmp_path / "run")
    vocabulary = Vocabulary.load(tmp_path / "run" / "vocabulary.json")
    torch.manual_seed(config.seed)
    trained = build_model(config, len(vocabulary)).double().eval()
    encode = SentenceEncoder(trained, vocabulary, torch.device("cpu")).encode
    order = np.random.default_rng([0, 0]).permutation(100)
    z = [encode(texts)[order].astype(np.float64) for texts in columns_of(rows[name])]
    scores = [config.scale * z[0] @ each.T for each in z[1:]]
    for hard in scores[1:]:
        hard[np.arange(100), np.arange(100)] += config.hard_negative_weight
    if model == "mixcse":
        mixed = unit(0.2 * z[1] + 0.8 * np.roll(z[1], -1, axis=0))
        scores.append(config.scale * (z[0] * mixed).sum(axis=1, keepdims=True))
    loss = log_mean_exp_loss(np.concatenate(scores, axis=1), scores[0].diagonal())
    line = metrics(tmp_path / "run")[0]
    assert line["loss"] == pytest.approx(loss, rel=1e-5)
    assert line["positive_cosine"] == pytest.approx((z[0] * z[1]).sum(axis=1).mean(), rel=1e-5)
    if name == "hard":
        hard = np.mean([(z[0] * each).sum(axis=1) for each in z[2:]])
        assert line["hard_negative_cosine"] == pytest.approx(hard, rel=1e-5)


def test_triplets_are_learnt_validated_without_dropout_and_resumed(rows, tmp_path):
    config = TrainConfig(
        (rows["hard"],),
        valid=rows["held"],
        model="simcse",
        **SMALL | {"encoder": "bow", "batch_size": 20, "dropout": 0.2, "report_every": 5},
        hard_negative_weight=0.5,
        learning_rate=0.01,
        valid_every=10,
        epochs=6,
    )
    train(config, tmp_path / "whole")
    lines = metrics(tmp_path / "whole")
    assert lines[-1]["step"] == 30
    assert lines[-1]["loss"] < 0.7 * lines[0]["loss"]
    train(replace(config, steps=13), tmp_path / "parts")
    train(config, tmp_path / "parts", resume=True)
    one, other = ((tmp_path / run / "model.safetensors").read_bytes() for run in ("whole", "parts"))
    assert one == other
    # Three batches of 20 held-out rows, encoded as `embed` encodes them.
    encode = SentenceEncoder.load(tmp_path / "whole").encode
    z = [encode(texts).astype(np.float64) for texts in columns_of(rows["held"])]
    cosine = np.mean((z[0] * z[1]).sum(axis=1))
    assert lines[-1]["validation_positive_cosine"] == pytest.approx(cosine, rel=1e-5)


@pytest.mark.parametrize("weight", [0.0, 1.5])
def test_ranks_train_on_rows_as_one_process_does_on_their_batches_together(rows, tmp_path, pool, weight):
    config = TrainConfig(
        (rows["hard"],), model="simcse", **SMALL | {"batch_size": 20}, hard_negative_weight=weight, epochs=2
    )
    on_two_ranks(pool, replace(config, batch_size=10), tmp_path / "two")
    train(config, tmp_path / "one")
    ours, theirs = ([line["loss"] for line in metrics(tmp_path / run)] for run in ("two", "one"))
    assert len(ours) == 10
    assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {"directions": ("query_to_doc", "doc_to_query"), "teacher_weight": 0.3, "false_negative_margin": 0.1},
        {"loss": "gist", "teacher_weight": 1.0, "chunk": 7},
        {"loss": "distillation", "learn_scale": True},
    ],
    ids=str,
)
def test_ranks_train_on_pairs_and_a_teacher_as_one_process_does(tmp_path, pool, settings):
    rows = write_rows(tmp_path / "rows.tsv", 111, 3)
    paths, _ = write_teacher(tmp_path, 111, 3)
    small = {"model": "pairs", "word_dim": 12, "batch_size": 20, "report_every": 1, "epochs": 2}
    config = TrainConfig((rows,), **small, **settings, teacher=paths)
    on_two_ranks(pool, replace(config, batch_size=10), tmp_path / "two")
    train(config, tmp_path / "one")
    ours, theirs = ([line["loss"] for line in metrics(tmp_path / run)] for run in ("two", "one"))
    assert len(ours) == 12  # of which each sixth has 11 rows, which are uneven shares
    assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("hard", {"model": "mixcse"}, "corpus: want rows of an anchor and a positive for mixcse, .* got 4"),
        ("pairs", {"hard_negative_weight": 1.0}, "hard_negative_weight: want 0.0 for rows without hard neg"),
        ("pairs", {"valid": "held"}, "held.tsv: line 1: want 2 columns, got 4"),
        (
            "hard",
            {"valid": "held", "batch_size": 61},
            "corpus is shorter than a batch: 60 sentences in .*held",
        ),
        ("hard", {"batch_size": 101}, "corpus is shorter than a batch: 100 sentences"),
    ],
)
def test_rows_that_a_loss_cannot_use_are_refused(rows, tmp_path, name, settings, message):
    if "valid" in settings:
        settings = settings | {"valid": rows["held"]}
    with pytest.raises(InputError, match=message):
        train(TrainConfig((rows[name],), **{"model": "simcse"} | SMALL | settings), tmp_path / "run")
    assert not (tmp_path / "run" / "model.safetensors").exists()
