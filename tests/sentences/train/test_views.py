"""A step of SimCSE or MixCSE equals its formula in numpy, with options of the loss and with masked words."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fastqt.errors import InputError
from fastqt.nn import masked_words
from fastqt.sentences.inference.encoder import SentenceEncoder
from fastqt.sentences.inference.expand import add_words
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.runs.model import build_model
from fastqt.sentences.text import Corpus, Vocabulary
from fastqt.sentences.train import train
from tests.shared.pairs_of_texts import columns_of, write_rows
from tests.shared.trainings import assert_same_weights, metrics, on_ranks

SMALL = {
    "keep_checkpoint": True,
    "encoder": "transformer",
    "word_dim": 12,
    "layers": 1,
    "heads": 3,
    "feedforward": 16,
}
SMALL |= {"dropout": 0.0, "batch_size": 48, "report_every": 1, "clip": 0.0}


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


@pytest.fixture
def orders(monkeypatch):
    """The random orders that torch draws, which tell the partners of MixCSE."""
    drawn, genuine = [], torch.randperm
    monkeypatch.setattr(
        torch, "randperm", lambda *args, **more: drawn.append(genuine(*args, **more)) or drawn[-1]
    )
    return drawn


def partners_of(order):
    partners = np.empty(len(order), dtype=int)
    partners[order] = np.roll(order, -1)
    return partners


def fresh_model_and_sample(config, run):
    """The model of a run before its first step, and what this step takes."""
    vocabulary = Vocabulary.load(run / "vocabulary.json")
    torch.manual_seed(config.seed)
    model = build_model(config, len(vocabulary)).double()
    corpus = Corpus(list(config.corpus), vocabulary)
    return model, corpus.sample(corpus.order(seed=0, epoch=0)[:48])


def views_of(config, run):
    model, sample = fresh_model_and_sample(config, run)
    return model(sample.tokens, sample.lengths)[0].detach().numpy()


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
def test_a_step_logs_loss_and_mixtures_of_its_partners(planted, tmp_path, orders, settings, options):
    config = TrainConfig((planted[0],), model="mixcse", **SMALL, **settings, steps=1)
    train(config, tmp_path / "run")
    z = views_of(config, tmp_path / "run")
    partners = partners_of(orders[0].numpy() if config.partner == "random" else np.arange(48))
    loss, mixed = loss_and_mixed_cosine(z, partners, form=config.form, scale=config.scale, **options)
    line = metrics(tmp_path / "run")[0]
    assert line["loss"] == pytest.approx(loss, rel=1e-5)
    assert line["mixed_cosine"] == pytest.approx(mixed, rel=1e-5)


@pytest.mark.parametrize("form", ["slides", "released"])
def test_ranks_log_the_mixtures_with_partners_on_the_first_rank(planted, tmp_path, orders, pool, form):
    config = TrainConfig((planted[0],), model="mixcse", **SMALL, form=form, partner="random", steps=1)
    on_ranks(pool, 2, replace(config, batch_size=24), tmp_path / "two")
    train(config, tmp_path / "one")
    ours, theirs = (metrics(tmp_path / run)[0] for run in ("two", "one"))
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    partners = partners_of(orders[0].numpy())
    here = np.flatnonzero(partners[:24] < 24)
    assert 0 < len(here) < 24
    z = views_of(config, tmp_path / "two")
    mixable = unit(z) if form == "slides" else z
    mixed = unit(0.2 * mixable[here] + 0.8 * mixable[partners[here]])
    assert ours["mixed_cosine"] == pytest.approx((unit(z)[here] * mixed).sum(axis=1).mean(), rel=1e-5)


@pytest.fixture
def rows(tmp_path):
    """Paths of pairs, of rows with two hard negatives, and of held-out rows with two."""
    kinds = {"pairs": (100, 2), "hard": (100, 4), "held": (60, 4)}
    return {name: write_rows(tmp_path / f"{name}.tsv", *kind, seed=len(name)) for name, kind in kinds.items()}


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
    encode = SentenceEncoder(trained, vocabulary, torch.device("cpu"), config).encode
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
    settings = SMALL | {"encoder": "bow", "batch_size": 20, "dropout": 0.2, "report_every": 5, "epochs": 6}
    settings |= {"hard_negative_weight": 0.5, "learning_rate": 0.01, "valid_every": 10}
    config = TrainConfig((rows["hard"],), valid=rows["held"], model="simcse", **settings)
    train(config, tmp_path / "whole")
    lines = metrics(tmp_path / "whole")
    assert lines[-1]["step"] == 30
    assert lines[-1]["loss"] < 0.7 * lines[0]["loss"]
    train(replace(config, steps=13), tmp_path / "parts")
    train(config, tmp_path / "parts", resume=True)
    assert_same_weights(tmp_path / "whole", tmp_path / "parts")
    # Three batches of 20 held-out rows, encoded as `embed` encodes them.
    encode = SentenceEncoder.load(tmp_path / "whole").encode
    z = [encode(texts).astype(np.float64) for texts in columns_of(rows["held"])]
    cosine = np.mean((z[0] * z[1]).sum(axis=1))
    assert lines[-1]["validation_positive_cosine"] == pytest.approx(cosine, rel=1e-5)


@pytest.mark.parametrize("weight", [0.0, 1.5])
def test_ranks_train_on_rows_as_one_process_does_on_their_batches_together(rows, tmp_path, pool, weight):
    settings = SMALL | {"batch_size": 20, "hard_negative_weight": weight, "epochs": 2}
    config = TrainConfig((rows["hard"],), model="simcse", **settings)
    on_ranks(pool, 2, replace(config, batch_size=10), tmp_path / "two")
    train(config, tmp_path / "one")
    ours, theirs = ([line["loss"] for line in metrics(tmp_path / run)] for run in ("two", "one"))
    assert len(ours) == 10
    assert ours == pytest.approx(theirs, rel=1e-5)


def test_rows_that_a_loss_cannot_use_are_refused(rows, tmp_path):
    for name, settings, message in (
        ("hard", {"model": "mixcse"}, "corpus: want rows of an anchor and a positive for mixcse, .* got 4"),
        ("pairs", {"hard_negative_weight": 1.0}, "hard_negative_weight: want 0.0 for rows without hard neg"),
        ("pairs", {"valid": rows["held"]}, "held.tsv: line 1: want 2 columns, got 4"),
        ("hard", {"valid": rows["held"], "batch_size": 61}, "shorter than a batch: 60 sentences in .*held"),
        ("hard", {"batch_size": 101}, "corpus is shorter than a batch: 100 sentences"),
    ):
        with pytest.raises(InputError, match=message):
            train(TrainConfig((rows[name],), **{"model": "simcse"} | SMALL | settings), tmp_path / "run")
        assert not (tmp_path / "run" / "model.safetensors").exists()


def mask_all(rank=None):
    """Every word becomes the mask token, so that nothing is left to chance."""
    masked_words.CHOSEN = masked_words.MASKED = 1.0


@pytest.fixture
def all_masked(monkeypatch):
    monkeypatch.setattr(masked_words, "CHOSEN", 1.0)
    monkeypatch.setattr(masked_words, "MASKED", 1.0)


@pytest.mark.parametrize("model", ["simcse", "mixcse"])
def test_a_step_adds_the_cross_entropy_of_masked_words(planted, tmp_path, all_masked, model):
    config = TrainConfig((planted[0],), model=model, **SMALL, masked_words=0.3, steps=1)
    train(config, tmp_path / "run")
    line = metrics(tmp_path / "run")[0]
    built, sample = fresh_model_and_sample(config, tmp_path / "run")
    table, head = built.encoder.embedding.weight, built.head
    mask = len(table) - 1
    assert mask == len(Vocabulary.load(tmp_path / "run" / "vocabulary.json"))
    losses = []
    for tokens, length in zip(sample.tokens, sample.lengths, strict=True):
        hidden = built.encoder.states(torch.full((1, int(length)), mask), length[None])
        hidden = head.norm(F.gelu(head.dense(hidden)))
        losses.append(F.cross_entropy(hidden @ table.T + head.bias, tokens[:length], reduction="none"))
    words = torch.cat(losses).mean().item()
    assert line["masked_word_loss"] == pytest.approx(words, rel=1e-5)
    views = built.loss(*built(sample.tokens, sample.lengths)).item()
    assert line["loss"] == pytest.approx(views + 0.3 * words, rel=1e-5)


def test_masked_words_are_learnt(planted, tmp_path):
    settings = SMALL | {"masked_words": 1.0, "learning_rate": 0.01, "epochs": 12, "valid_every": 60}
    config = TrainConfig((planted[0],), valid=planted[1], model="simcse", **settings)
    train(config, tmp_path / "run")
    lines = metrics(tmp_path / "run")
    first, last = (lines[index]["masked_word_loss"] for index in (0, -1))
    assert last < 0.8 * first
    assert lines[-1]["validation_masked_word_loss"] < 0.8 * first


def test_vectors_do_not_depend_on_the_head(planted, tmp_path):
    config = TrainConfig((planted[0],), model="simcse", **SMALL, masked_words=0.1, steps=2)
    train(config, tmp_path / "run")
    train(replace(config, masked_words=0.0), tmp_path / "without")
    texts = [(tmp_path / run / "vocabulary.json").read_bytes() for run in ("run", "without")]
    assert texts[0] == texts[1]
    encoder = SentenceEncoder.load(tmp_path / "run")
    sentences = ["topic0word1 topic0word2", "topic3word1 new"]
    before = encoder.encode(sentences)
    with torch.no_grad():
        for parameter in encoder.model.head.parameters():
            parameter.fill_(torch.nan)
        encoder.model.encoder.embedding.weight[-1] = torch.nan  # the mask token's vector
    assert (encoder.encode(sentences) == before).all()
    with pytest.raises(InputError, match="run: want a model that was trained without masked words"):
        add_words(tmp_path / "run", ["a"], torch.zeros(1, 2).numpy(), tmp_path / "more")


def test_ranks_predict_words_as_one_process_does(planted, tmp_path, all_masked, pool):
    config = TrainConfig((planted[0],), model="simcse", **SMALL, masked_words=0.5, epochs=1)
    # Before the first step of each rank all words become masked ones there too.
    answers = on_ranks(pool, 2, replace(config, batch_size=24), tmp_path / "two", False, mask_all, 1)
    assert answers[0].parameters == answers[1].parameters
    train(config, tmp_path / "one")
    for name in ("loss", "masked_word_loss"):
        ours, theirs = ([line[name] for line in metrics(tmp_path / run)] for run in ("two", "one"))
        assert ours == pytest.approx(theirs, rel=1e-5)
