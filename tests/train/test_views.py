"""A step of SimCSE or MixCSE equals its formula in numpy, whatever options of the loss are given."""

import json

import numpy as np
import pytest
import torch

from fastqt.runs.config import TrainConfig
from fastqt.runs.model import build_model
from fastqt.text import Corpus, Vocabulary
from fastqt.train import train

SMALL = {"encoder": "transformer", "word_dim": 12, "layers": 1, "heads": 3, "feedforward": 16}
SMALL |= {"dropout": 0.0, "batch_size": 48, "report_every": 1, "clip": 0.0}


def metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


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
    sample = next(Corpus([planted[0]], vocabulary).shuffled(48, seed=0, epoch=0))
    z = model(sample.tokens, sample.lengths)[0].detach().numpy()
    partners = (np.arange(48) + 1) % 48
    if config.partner == "random":
        order = drawn[0].numpy()
        partners[order] = np.roll(order, -1)
    loss, mixed = loss_and_mixed_cosine(z, partners, form=config.form, scale=config.scale, **options)
    line = metrics(tmp_path / "run")[0]
    assert line["loss"] == pytest.approx(loss, rel=1e-5)
    assert line["mixed_cosine"] == pytest.approx(mixed, rel=1e-5)


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
