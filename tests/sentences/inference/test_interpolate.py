"""GLOSS from end to end: training, resuming, embedding and interpolated sentences."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fastqt.errors import InputError
from fastqt.sentences.cli import main
from fastqt.sentences.inference.encoder import SentenceEncoder
from fastqt.sentences.inference.interpolate import sentences_between, vectors_between
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.runs.model import build_model
from fastqt.sentences.text import Corpus, Vocabulary
from fastqt.sentences.train import train
from tests.shared.gloss_oracle import Oracle
from tests.shared.tolerances import FLOAT32, FLOAT64, relative

MODELS = ("gloss-bow", "gloss-pos")
SMALL = {"keep_checkpoint": True, "word_dim": 6, "batch_size": 48, "report_every": 3}
SENTENCES = (
    "The cat sat on the mat .",
    "A dog ran over the hill",
    "No comment on police suspension .",
    "History tells us differently",
    "Rain fell all day",
)


@pytest.fixture(scope="module", params=MODELS)
def trained(request, tmp_path_factory):
    """The directory of a model that has memorised five sentences."""
    corpus = tmp_path_factory.mktemp("corpus") / "five.txt"
    corpus.write_text("\n".join(SENTENCES))
    run = corpus.parent / "run"
    settings = {"word_dim": 200, "learning_rate": 0.01, "batch_size": 5, "epochs": 50, "report_every": 50}
    train(TrainConfig((str(corpus),), model=request.param, **settings), run)
    return run


@pytest.mark.parametrize("model", MODELS)
def test_steps_agree_with_numpy(planted, tmp_path, model):
    """With shuffled batches, the options of the paper, and <unk> for most words."""
    config = TrainConfig((planted[0],), model=model, vocab_size=30, steps=3, seed=5, clip=1.0, **SMALL)
    assert (config.learning_rate, config.epochs, replace(config, clip=None).clip) == (3e-4, 210, 25)
    train(config, tmp_path / "run")
    vocabulary = Vocabulary.load(tmp_path / "run" / "vocabulary.json")
    corpus = Corpus([planted[0]], vocabulary)
    torch.manual_seed(5)
    oracle = Oracle(build_model(config, 30, sentences=len(corpus)), lr=3e-4, clip=1.0)
    for batch in map(corpus.sample, np.split(corpus.order(seed=5, epoch=0)[: 3 * 48], 3)):
        loss, _ = oracle.step(batch.rows.numpy(), batch.tokens.numpy(), batch.lengths.numpy())
        latents, words = oracle.values["latents"][batch.rows], batch.lengths
        if model == "gloss-bow":
            words = (batch.tokens != 0).sum(1)
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    times = {"sentences_per_second", "tokens_per_second", "seconds", "cpu_seconds"}
    times |= {"data_seconds", "gradients_seconds", "optimiser_seconds"}
    assert {"step", "loss", "loss_per_word", "latent_norm", *times} == line.keys()
    assert line["loss"] == pytest.approx(loss, rel=FLOAT32)
    assert line["loss_per_word"] == pytest.approx(loss * 48 / int(words.sum()), rel=FLOAT32)
    assert line["latent_norm"] == pytest.approx(np.linalg.norm(latents, axis=1).mean(), rel=1e-3)
    for name, stored in load_file(tmp_path / "run" / "model.safetensors").items():
        if name != "radius":
            # For comparison: the first step of Adam changes each weight by the learning rate, 3e-4.
            assert (stored.double() - torch.from_numpy(oracle.values[name])).abs().max() < 1e-6, name


def test_the_mean_over_positions_is_trained(planted, tmp_path):
    """The steps are those of numpy, and the loss per word is the loss."""
    config = TrainConfig((planted[0],), model="gloss-pos", position_loss="mean", steps=3, seed=5, **SMALL)
    train(config, tmp_path / "run")
    encoder = SentenceEncoder.load(tmp_path / "run")
    assert encoder.model.position_loss == "mean"
    corpus = Corpus([planted[0]], encoder.vocabulary)
    torch.manual_seed(5)
    oracle = Oracle(build_model(config, len(encoder.vocabulary), sentences=len(corpus)), lr=3e-4, clip=25.0)
    for batch in map(corpus.sample, np.split(corpus.order(seed=5, epoch=0)[: 3 * 48], 3)):
        loss, _ = oracle.step(batch.rows.numpy(), batch.tokens.numpy(), batch.lengths.numpy())
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert line["loss"] == line["loss_per_word"] == pytest.approx(loss, rel=FLOAT32)
    with pytest.raises(InputError, match="position_loss: want 'sum' with model gloss-bow, got 'mean'"):
        TrainConfig(("x",), model="gloss-bow", position_loss="mean")


@pytest.mark.parametrize("latents", ["rows", "all"])
def test_a_step_moves_the_right_latent_vectors(planted, tmp_path, latents):
    config = TrainConfig((planted[0],), model="gloss-bow", latents=latents, steps=3, **SMALL)
    train(config, tmp_path / "run")
    stored = load_file(tmp_path / "run" / "model.safetensors")["latents"]
    after_two = tmp_path / "two"
    train(replace(config, steps=2), after_two)
    moved = (stored != load_file(after_two / "model.safetensors")["latents"]).any(1)
    vocabulary = Vocabulary.load(after_two / "vocabulary.json")
    order = Corpus([planted[0]], vocabulary).order(seed=0, epoch=0)
    named = order[: 3 * 48] if latents == "all" else order[2 * 48 : 3 * 48]
    assert moved.nonzero()[:, 0].tolist() == sorted(named)
    assert stored.norm(dim=1).max() < 2 + 1e-6


@pytest.mark.parametrize(
    ("model", "latents"), [("gloss-bow", "rows"), ("gloss-bow", "all"), ("gloss-pos", "rows")]
)
@pytest.mark.parametrize("pause", [4, 10])  # within the first epoch, and at its end
def test_a_paused_training_equals_an_uninterrupted_one(planted, tmp_path, model, latents, pause):
    config = TrainConfig((planted[0],), model=model, latents=latents, epochs=2, **SMALL | {"report_every": 1})
    config = replace(config, steps=13)
    train(config, tmp_path / "whole")
    train(replace(config, steps=pause), tmp_path / "parts")
    assert train(config, tmp_path / "parts", resume=True).step == 13
    for name in ("model.safetensors", "checkpoint.safetensors"):
        whole, parts = (load_file(tmp_path / run / name) for run in ("whole", "parts"))
        assert whole.keys() == parts.keys()
        assert all(torch.equal(whole[key], parts[key]) for key in whole)
    lines = [
        [
            [value for key, value in json.loads(line).items() if "second" not in key]
            for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()
        ]
        for run in ("whole", "parts")
    ]
    assert lines[0] == lines[1]


def test_held_out_sentences_are_inferred(planted, tmp_path):
    options = {"valid": planted[1], "valid_batches": 1, "steps": 1}
    config = TrainConfig((planted[0],), model="gloss-pos", **SMALL | options)
    line = train(config, tmp_path / "run").metrics
    encoder = SentenceEncoder.load(tmp_path / "run")
    tokens, lengths, _ = Corpus([planted[1]], encoder.vocabulary).sample(np.arange(48))
    latents = encoder.model.infer(tokens, lengths)
    loss = encoder.model.loss(latents, tokens, lengths).item()
    assert line["validation_loss"] == pytest.approx(loss, rel=FLOAT32)
    assert line["validation_loss_per_word"] == pytest.approx(loss * 48 / lengths.sum().item(), rel=FLOAT32)
    assert line["validation_latent_norm"] == pytest.approx(latents.norm(dim=1).mean().item(), rel=FLOAT32)


def test_a_loaded_model_has_the_stored_weights(trained):
    encoder = SentenceEncoder.load(trained)
    assert encoder.model.latents.shape == (5, 200)
    stored = load_file(trained / "model.safetensors")
    assert stored.keys() == encoder.model.state_dict().keys()
    assert all(torch.equal(stored[name], value) for name, value in encoder.model.state_dict().items())


def test_memorised_sentences_are_generated(trained):
    encoder = SentenceEncoder.load(trained)
    tokens, lengths, _ = Corpus([str(trained.parent / "five.txt")], encoder.vocabulary).sample(np.arange(5))
    words = encoder.model.generate(encoder.model.latents.detach(), lengths)
    if encoder.model.decoder == "bow":
        words, tokens = words.sort(1).values, tokens.sort(1).values
    assert torch.equal(words, tokens)


def test_interpolation_begins_and_ends_with_the_two_sentences(trained, capsys):
    encoder = SentenceEncoder.load(trained)
    order = sorted if encoder.model.decoder == "bow" else list
    found = sentences_between(encoder, SENTENCES[2], SENTENCES[3])
    assert [share for share, _ in found] == [0, 0.2, 0.4, 0.6, 0.8, 1]
    texts = [text.split() for _, text in found]
    assert order(texts[0]) == order(SENTENCES[2].split())
    assert order(texts[-1]) == order(SENTENCES[3].split())
    assert [len(text) for text in texts] == [6, 6, 5, 5, 4, 4]
    arguments = ["--from", SENTENCES[2], "--to", SENTENCES[3], "--steps", "1", "--slerp"]
    assert main(["interpolate", str(trained), *arguments]) == 0
    ends = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in ends] == ["0.00", "0.50", "1.00"]
    assert [ends[0][1:], ends[2][1:]] == [texts[0], texts[-1]]


def test_a_gloss_model_embeds_and_searches(trained, tmp_path, capsys):
    text = str(trained.parent / "five.txt")
    assert main(["embed", str(trained), text, "--out", str(tmp_path / "x.npy")]) == 0
    assert "5 x 200 float32" in capsys.readouterr().out
    np.testing.assert_allclose(np.linalg.norm(np.load(tmp_path / "x.npy"), axis=1), 1, rtol=1e-5)
    assert main(["neighbors", str(trained), text, "--query", SENTENCES[1], "-k", "2"]) == 0
    assert f"1.000  {SENTENCES[1]}  " in capsys.readouterr().out.splitlines()[1]


def test_vectors_between_follow_their_definition():
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 7, dtype=torch.float64, generator=generator)
    shares = torch.tensor([0.0, 0.2, 0.5, 1.0], dtype=torch.float64)
    straight = vectors_between(a, b, shares)
    assert relative(straight, np.outer(1 - shares, a) + np.outer(shares, b)) < FLOAT64
    arc = vectors_between(a, b, shares, slerp=True)
    assert relative(arc[[0, 3]], torch.stack([a, b])) < FLOAT64
    assert relative(arc.norm(dim=1), (1 - shares) * a.norm() + shares * b.norm()) < FLOAT64
    cosines = (arc @ a) / (arc.norm(dim=1) * a.norm())
    whole = torch.arccos(a @ b / (a.norm() * b.norm()))
    assert relative(torch.arccos(cosines[1:]), shares[1:] * whole) < FLOAT64
    # The arc lies in the plane of both vectors.
    assert torch.linalg.matrix_rank(torch.cat([arc, torch.stack([a, b])])) == 2


@pytest.mark.parametrize("other", [lambda a: 3 * a, lambda a: -2 * a, lambda a: 0 * a], ids=range(3))
def test_slerp_of_parallel_vectors_is_a_straight_line(other):
    a = torch.tensor([1.0, -2.0, 3.0])
    shares = torch.tensor([0.0, 0.25, 1.0])
    for pair in ((a, other(a)), (other(a), a)):
        assert torch.equal(vectors_between(*pair, shares, slerp=True), vectors_between(*pair, shares))


def test_wrong_arguments_of_interpolation_are_refused(trained, planted, tmp_path, capsys):
    encoder = SentenceEncoder.load(trained)
    with pytest.raises(InputError, match="from: want a sentence, got blank text"):
        sentences_between(encoder, " ", "a")
    with pytest.raises(InputError, match="steps: want 0 to 1000, got -1"):
        sentences_between(encoder, "b", "a", steps=-1)
    with pytest.raises(InputError, match="steps: want 0 to 1000, got 1000000000"):
        sentences_between(encoder, "b", "a", steps=10**9)
    train(TrainConfig((planted[0],), steps=1, **SMALL), tmp_path / "other")
    assert main(["interpolate", str(tmp_path / "other"), "--from", "a", "--to", "b"]) == 2
    assert "model: want one trained with --model gloss-" in capsys.readouterr().err


def test_a_radius_of_0_is_refused():
    with pytest.raises(InputError, match="radius: want at least 1e-06, got 0"):
        TrainConfig(("x",), model="gloss-bow", radius=0.0)
    assert math.isclose(build_model(TrainConfig(("x",), model="gloss-bow", radius=3.0), 9).radius, 3)
