"""The combined model: trained apart on the same batches, joined at test time."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from fastqt.sentences.cli import main
from fastqt.sentences.inference.encoder import SentenceEncoder
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.train import train
from tests.shared.tolerances import FLOAT32, relative

SMALL = {
    "keep_checkpoint": True,
    "word_dim": 6,
    "hidden_size": 8,
    "batch_size": 48,
    "context_size": 1,
    "report_every": 1,
}
TEXTS = ["place1 topic2word1 topic2word0", "place0 unheard", "topic5word2"]


def trained(planted, folder, encoder, **settings):
    """A run of four steps with large gradients, so that clipping matters."""
    settings = {**SMALL, "steps": 4, "learning_rate": 0.05, "valid": planted[1], **settings}
    train(TrainConfig((planted[0],), encoder=encoder, **settings), folder / encoder)
    return folder / encoder


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    "settings",
    [{"clip": 1e-3}, {"clip": 1e-3, "clip_by": "variable", "documents": "cross"}, {"clip": 0.0, "seed": 5}],
    ids=str,
)
def test_each_model_is_the_one_that_is_trained_alone(planted, tmp_path, settings):
    runs = {name: trained(planted, tmp_path, name, **settings) for name in ("combine", "gru", "bigru")}
    models = {name: SentenceEncoder.load(run).model for name, run in runs.items()}
    for part, name in zip(models["combine"].models, ("gru", "bigru"), strict=True):
        alone = models[name].state_dict()
        assert part.state_dict().keys() == alone.keys()
        for key, weight in part.state_dict().items():
            assert torch.equal(weight, alone[key]), (name, key)
    lines = {
        name: [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        for name, run in runs.items()
    }
    reported = [[line for line in each if line["step"]] for each in lines.values()]  # not of fresh weights
    for joined, uni, bi in zip(*reported, strict=True):
        assert joined["loss"] == pytest.approx(uni["loss"] + bi["loss"], rel=1e-6)
        for way in ("forward_accuracy", "backward_accuracy"):
            assert (joined[f"gru_{way}"], joined[f"bigru_{way}"]) == (uni[way], bi[way])
    last = [run[-1] for run in lines.values()]
    assert last[0]["validation_bigru_forward_accuracy"] == last[2]["validation_forward_accuracy"]


def test_vectors_are_joined_by_halves_of_norm_one(planted, tmp_path):
    runs = [trained(planted, tmp_path, name) for name in ("combine", "gru", "bigru")]
    combine, *alone = (SentenceEncoder.load(run) for run in runs)
    raw = [encoder.encode(TEXTS, normalize=False).astype(np.float64) for encoder in alone]
    halves = [half for each in raw for half in np.split(each, 2, axis=1)]
    wanted = np.hstack([half / np.sqrt((half**2).sum(axis=1, keepdims=True)) for half in halves])
    found = combine.encode(TEXTS)
    assert found.shape == (3, 4 * 8) == (3, combine.model.embedding_dim)
    assert relative(torch.from_numpy(found), wanted) <= FLOAT32
    assert np.linalg.norm(found, axis=1) == pytest.approx([2.0] * 3)  # the whole is not normalised again
    assert np.array_equal(combine.encode(TEXTS, normalize=False), np.hstack(raw).astype(np.float32))


def test_the_joined_accuracy_is_that_of_the_sum_of_scores(planted, tmp_path):
    run = trained(planted, tmp_path, "combine", steps=1, learning_rate=0.0, valid=None)
    line = json.loads((run / "metrics.jsonl").read_text())
    encoder = SentenceEncoder.load(run)
    with open(planted[0]) as file:
        sentences = [line.strip() for line in file if line.strip()][:48]
    vectors = encoder.encode(sentences, normalize=False).astype(np.float64)
    f_uni, g_uni, f_bi, g_bi = np.split(vectors, 4, axis=1)
    scores = f_uni @ g_uni.T + f_bi @ g_bi.T
    np.fill_diagonal(scores, 0)
    best = scores.argmax(axis=1)
    assert line["forward_accuracy"] == pytest.approx(np.mean(best[:-1] == np.arange(1, 48)))
    assert line["backward_accuracy"] == pytest.approx(np.mean(best[1:] == np.arange(47)))


def test_a_combined_run_is_resumed(planted, tmp_path):
    whole = trained(planted, tmp_path / "whole", "combine")
    parts = trained(planted, tmp_path / "parts", "combine", steps=2)
    train(replace(TrainConfig.load(parts / "config.json"), steps=4), parts, resume=True)
    ours, theirs = (SentenceEncoder.load(run).model.state_dict() for run in (whole, parts))
    assert all(torch.equal(weight, theirs[name]) for name, weight in ours.items())


def test_commands_take_a_combined_run(planted, tmp_path, capsys):
    run = str(trained(planted, tmp_path, "combine"))
    assert main(["embed", run, planted[1], "--out", str(tmp_path / "x.npy")]) == 0
    assert np.load(tmp_path / "x.npy").shape[1] == 32
    assert main(["neighbors", run, planted[1], "--query", TEXTS[0], "-k", "1"]) == 0
    words = [f"topic{topic}word{word}" for topic in range(30) for word in range(3)] + ["zebra"]
    np.savez(tmp_path / "v.npz", words=np.array(words), vectors=np.random.default_rng(0).normal(size=(91, 3)))
    assert main(["expand", run, str(tmp_path / "v.npz"), "--out", str(tmp_path / "more")]) == 0
    assert "words added" in capsys.readouterr().out
    before, after = (SentenceEncoder.load(each) for each in (run, tmp_path / "more"))
    assert np.array_equal(before.encode(TEXTS), after.encode(TEXTS))
    assert np.abs(after.encode(["zebra"]) - before.encode(["zebra"])).max() > 1e-3
