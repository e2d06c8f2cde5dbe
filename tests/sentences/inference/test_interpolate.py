"""GLOSS from end to end: training, resuming, inference as it is told, embedding, interpolated sentences."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fastqt.errors import InputError
from fastqt.nn.gloss_inference import Inference
from fastqt.sentences.cli import main
from fastqt.sentences.evaluation import load_encoder
from fastqt.sentences.inference.encoder import SentenceEncoder, chosen_inference, set_inference
from fastqt.sentences.inference.interpolate import sentences_between, vectors_between
from fastqt.sentences.options.commands import InferenceOptions
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.runs.model import build_model
from fastqt.sentences.text import Corpus, Vocabulary, pad
from fastqt.sentences.train import train
from tests.shared.command_lines import error_line
from tests.shared.gloss_oracle import Oracle
from tests.shared.tolerances import FLOAT32, FLOAT64, relative

MODELS = ("gloss-bow", "gloss-pos")
SMALL = {"keep_checkpoint": True, "word_dim": 6, "batch_size": 48, "report_every": 3}
SENTENCES = [
    *("The cat sat on the mat .", "A dog ran over the hill", "No comment on police suspension ."),
    *("History tells us differently", "Rain fell all day"),
]
UNSEEN = [
    *("The dog sat on police hill", "History fell over the mat .", "No cat ran all day ."),
    *("A comment tells us differently", "suspension Rain hill us on sat"),
]
SPECIFIED = ["--inference", "specified", "--inference-steps", "7", "--inference-learning-rate", "0.5"]
HOW = Inference(steps=7, learning_rate=0.5, safeguard=False)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "five.txt"
    path.write_text("\n".join(SENTENCES))
    return path


@pytest.fixture(scope="module", params=MODELS)
def trained(request, corpus):
    """The directory of a model that has memorised five sentences."""
    run = corpus.parent / request.param
    settings = {"word_dim": 200, "learning_rate": 0.01, "batch_size": 5, "epochs": 50, "report_every": 50}
    train(TrainConfig((str(corpus),), model=request.param, **settings), run)
    return run


@pytest.fixture(scope="module", params=MODELS)
def well_trained(request, corpus):
    """That of one whose decoder is so steep that specified steps of inference diverge."""
    run = corpus.parent / f"well-trained-{request.param}"
    settings = {"word_dim": 40, "learning_rate": 0.1, "batch_size": 5, "epochs": 100, "report_every": 100}
    train(TrainConfig((str(corpus),), model=request.param, **settings), run)
    return run


@pytest.fixture(scope="module")
def other(corpus):
    """That of a model of another kind."""
    run = corpus.parent / "other"
    train(TrainConfig((str(corpus),), word_dim=4, batch_size=4, context_size=1, steps=1), run)
    return run


def metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("model", "options", "clip"),
    [
        *((model, {"vocab_size": 30, "clip": 1.0}, 1.0) for model in MODELS),  # <unk> for most words
        ("gloss-pos", {"position_loss": "mean"}, 25.0),
    ],
    ids=[*MODELS, "mean over positions"],
)
def test_steps_agree_with_numpy(planted, tmp_path, model, options, clip):
    """With shuffled batches, and the options of the paper."""
    config = TrainConfig(
        (planted[0],), model=model, steps=3, seed=5, **{**SMALL, **options, "report_every": 1}
    )
    assert (config.learning_rate, config.epochs, replace(config, clip=None).clip) == (3e-4, 210, 25)
    train(config, tmp_path / "run")
    vocabulary = Vocabulary.load(tmp_path / "run" / "vocabulary.json")
    corpus = Corpus([planted[0]], vocabulary)
    torch.manual_seed(5)
    oracle = Oracle(build_model(config, len(vocabulary), sentences=len(corpus)), lr=3e-4, clip=clip)
    for batch in map(corpus.sample, np.split(corpus.order(seed=5, epoch=0)[: 3 * 48], 3)):
        loss, _ = oracle.step(batch.rows.numpy(), batch.tokens.numpy(), batch.lengths.numpy())
        latents, words = oracle.values["latents"][batch.rows], batch.lengths
        if model == "gloss-bow":
            words = (batch.tokens != 0).sum(1)
    line = metrics(tmp_path / "run")[-1]
    times = {"sentences_per_second", "tokens_per_second", "seconds", "cpu_seconds"}
    times |= {"data_seconds", "gradients_seconds", "optimiser_seconds"}
    assert {"step", "loss", "loss_per_word", "latent_norm", *times} == line.keys()
    assert line["loss"] == pytest.approx(loss, rel=FLOAT32)
    per_word = loss if "position_loss" in options else loss * 48 / int(words.sum())
    assert line["loss_per_word"] == pytest.approx(per_word, rel=FLOAT32)
    assert line["latent_norm"] == pytest.approx(np.linalg.norm(latents, axis=1).mean(), rel=1e-3)
    for name, stored in load_file(tmp_path / "run" / "model.safetensors").items():
        if name != "radius":
            # For comparison: the first step of Adam changes each weight by the learning rate, 3e-4.
            assert (stored.double() - torch.from_numpy(oracle.values[name])).abs().max() < 1e-6, name


@pytest.mark.parametrize("latents", ["rows", "all"])
def test_a_step_moves_the_right_latent_vectors(planted, tmp_path, latents):
    config = TrainConfig((planted[0],), model="gloss-bow", latents=latents, steps=3, **SMALL)
    train(config, tmp_path / "three")
    train(replace(config, steps=2), tmp_path / "two")
    three, two = (load_file(tmp_path / run / "model.safetensors")["latents"] for run in ("three", "two"))
    vocabulary = Vocabulary.load(tmp_path / "two" / "vocabulary.json")
    order = Corpus([planted[0]], vocabulary).order(seed=0, epoch=0)
    named = order[: 3 * 48] if latents == "all" else order[2 * 48 : 3 * 48]
    assert (three != two).any(1).nonzero()[:, 0].tolist() == sorted(named)
    assert three.norm(dim=1).max() < 2 + 1e-6


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
        [[value for key, value in line.items() if "second" not in key] for line in metrics(tmp_path / run)]
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


def test_memorised_sentences_are_generated_and_interpolated(trained, capsys):
    encoder = SentenceEncoder.load(trained)
    stored = load_file(trained / "model.safetensors")
    assert stored["latents"].shape == (5, 200)
    assert stored.keys() == encoder.model.state_dict().keys()
    assert all(torch.equal(stored[name], value) for name, value in encoder.model.state_dict().items())
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
    # Of parallel vectors it is a straight line.
    a, shares = torch.tensor([1.0, -2.0, 3.0]), torch.tensor([0.0, 0.25, 1.0])
    for x, y in ((a, f * a) for f in (3, -2, 0)):
        for pair in ((x, y), (y, x)):
            assert torch.equal(vectors_between(*pair, shares, slerp=True), vectors_between(*pair, shares))


def vectors(run, how, sentences=SENTENCES):
    encoder = set_inference(SentenceEncoder.load(run, "cpu"), how)
    return encoder.encode(sentences, normalize=False)


def test_specified_steps_diverge_on_a_well_trained_decoder_and_safeguarded_ones_do_not(well_trained):
    """Both take 250 steps of the learning rate 1 from the same start; the specified ones end above it."""
    encoder = SentenceEncoder.load(well_trained, "cpu")
    tokens, lengths = pad(encoder.vocabulary.encode(UNSEEN))
    start, safeguarded, specified = (
        encoder.model.loss(torch.from_numpy(vectors(well_trained, how, UNSEEN)), tokens, lengths).item()
        for how in (Inference(steps=0), Inference(), Inference(safeguard=False))
    )
    assert safeguarded < start < specified


def test_commands_infer_as_they_are_told(well_trained, corpus, tmp_path, capsys):
    """No step at all leaves random vectors, which find and generate something else."""
    run, out = str(well_trained), tmp_path / "x.npy"
    for words, how in ((SPECIFIED, HOW), ([], None), (["--inference", "safeguarded"], Inference())):
        assert main(["embed", run, str(corpus), "--out", str(out), "--raw", *words]) == 0
        np.testing.assert_array_equal(np.load(out), vectors(run, how))
    assert np.abs(vectors(run, HOW) - vectors(run, None)).max() > 0.01
    np.testing.assert_array_equal(vectors(run, Inference()), vectors(run, None))
    capsys.readouterr()
    for words in (
        ["neighbors", run, str(corpus), "--query", "Rain fell on the cat", "-k", "2"],
        ["interpolate", run, "--from", SENTENCES[0], "--to", SENTENCES[3]],
    ):
        printed = []
        safeguarded = ["--inference", "safeguarded", "--inference-steps", "250"]
        for more in ([], safeguarded, ["--inference-steps", "0"]):
            assert main([*words, *more]) == 0
            printed.append(capsys.readouterr().out)
        assert printed[0] == printed[1] != printed[2]


def test_evaluate_infers_as_it_is_told(well_trained, tmp_path, capsys):
    """The results say by which way, as a part of the identity."""
    run, folder = str(well_trained), tmp_path / "data" / "MR"
    folder.mkdir(parents=True)
    lines = [f"{i % 2}\t{SENTENCES[i % 5]} {SENTENCES[i % 3]} {i}" for i in range(40)]
    (folder / "all.tsv").write_text("\n".join(lines) + "\n")
    words = ["evaluate", run, "--data", str(tmp_path / "data")]
    digests = []
    for more, how in (([], None), (["--inference", "safeguarded"], Inference()), (SPECIFIED, HOW)):
        assert main([*words, *more, "--json", str(tmp_path / "out.json")]) == 0
        digests.append(load_encoder(run, inference=how).identity)
        assert digests[-1] in (tmp_path / "out.json").read_text()
    capsys.readouterr()
    assert digests[0] == digests[1] != digests[2]
    assert digests[2] != load_encoder(run, inference=replace(HOW, steps=8)).identity
    encoder = load_encoder(run, raw=True, inference=HOW)
    np.testing.assert_array_equal(encoder.encode(SENTENCES), vectors(run, HOW))


def chosen(inference, steps, learning_rate):
    return chosen_inference(InferenceOptions(inference, steps, learning_rate))


def test_options_of_inference(other, corpus, tmp_path, capsys):
    assert chosen(None, None, None) is None
    assert chosen("specified", 7, 0.5) == HOW
    assert chosen(None, 9, None) == Inference(steps=9)
    assert chosen("specified", None, None) == Inference(250, 1.0, False)
    with pytest.raises(InputError, match=r"inference_steps: want at least 0 and less than .*, got -1"):
        chosen(None, -1, None)
    with pytest.raises(InputError, match=r"inference_learning_rate: want more than 0, got 0\.0"):
        chosen("specified", None, 0.0)
    with pytest.raises(InputError, match="inference: want a trained model, got word-vectors:x"):
        load_encoder("word-vectors:x", inference=HOW)
    message = error_line(
        capsys, "embed", other, corpus, "--out", tmp_path / "x.npy", "--inference-steps", "3"
    )
    assert "inference: want it with a model trained with --model gloss-bow or gloss-pos alone" in message
    message = error_line(capsys, "interpolate", other, "--from", "a", "--to", "b")
    assert "model: want one trained with --model gloss-" in message


def test_wrong_arguments_of_gloss_are_refused(trained):
    encoder = SentenceEncoder.load(trained)
    with pytest.raises(InputError, match="from: want a sentence, got blank text"):
        sentences_between(encoder, " ", "a")
    for steps in (-1, 10**9):
        with pytest.raises(InputError, match=f"steps: want 0 to 1000, got {steps}"):
            sentences_between(encoder, "b", "a", steps=steps)
    with pytest.raises(InputError, match="radius: want at least 1e-06, got 0"):
        TrainConfig(("x",), model="gloss-bow", radius=0.0)
    assert math.isclose(build_model(TrainConfig(("x",), model="gloss-bow", radius=3.0), 9).radius, 3)
    with pytest.raises(InputError, match="position_loss: want it with model gloss-pos alone, got 'mean'"):
        TrainConfig(("x",), model="gloss-bow", position_loss="mean")
