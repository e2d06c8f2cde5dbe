"""The command line chooses how GLOSS finds latent vectors, by specified steps or by safeguarded ones."""

import json

import numpy as np
import pytest
import torch

from fastqt.errors import InputError
from fastqt.nn.gloss_inference import Inference
from fastqt.sentences.cli import main
from fastqt.sentences.evaluation import load_encoder
from fastqt.sentences.inference.encoder import SentenceEncoder
from fastqt.sentences.inference.latents import chosen_inference, set_inference
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.text import pad
from fastqt.sentences.train import train

SENTENCES = (
    "The cat sat on the mat .",
    "A dog ran over the hill",
    "No comment on police suspension .",
    "History tells us differently",
    "Rain fell all day",
)
UNSEEN = (
    "The dog sat on police hill",
    "History fell over the mat .",
    "No cat ran all day .",
    "A comment tells us differently",
    "suspension Rain hill us on sat",
)
SPECIFIED = ["--inference", "specified", "--inference-steps", "7", "--inference-learning-rate", "0.5"]
HOW = Inference(steps=7, learning_rate=0.5, safeguard=False)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("latents") / "five.txt"
    path.write_text("\n".join(SENTENCES) + "\n")
    return path


@pytest.fixture(scope="module", params=["gloss-bow", "gloss-pos"])
def trained(request, corpus):
    """The directory of a model that has memorised five sentences."""
    run = corpus.parent / request.param
    settings = {"word_dim": 40, "learning_rate": 0.1, "batch_size": 5, "epochs": 100, "report_every": 100}
    train(TrainConfig((str(corpus),), model=request.param, **settings), run)
    return run


@pytest.fixture(scope="module")
def other(corpus):
    """The directory of a model of another kind."""
    run = corpus.parent / "other"
    train(TrainConfig((str(corpus),), word_dim=4, batch_size=4, context_size=1, steps=1), run)
    return run


def vectors(run, how, sentences=SENTENCES):
    encoder = set_inference(SentenceEncoder.load(run, "cpu"), how)
    return encoder.encode(list(sentences), normalize=False)


def test_specified_steps_diverge_on_a_well_trained_decoder_and_safeguarded_ones_do_not(trained):
    """Both take 250 steps of the learning rate 1 from the same start; the specified ones end above it."""
    encoder = SentenceEncoder.load(trained, "cpu")
    tokens, lengths = pad(encoder.vocabulary.encode(list(UNSEEN)))
    losses = []
    for how in (Inference(steps=0), Inference(), Inference(safeguard=False)):
        latents = torch.from_numpy(vectors(trained, how, UNSEEN))
        losses.append(encoder.model.loss(latents, tokens, lengths).item())
    start, safeguarded, specified = losses
    assert safeguarded < start < specified


def test_embed_infers_as_it_is_told(trained, corpus, tmp_path, capsys):
    out = tmp_path / "x.npy"
    for words, how in ((SPECIFIED, HOW), ([], None), (["--inference", "safeguarded"], Inference())):
        assert main(["embed", str(trained), str(corpus), "--out", str(out), "--raw", *words]) == 0
        np.testing.assert_array_equal(np.load(out), vectors(trained, how))
    assert np.abs(vectors(trained, HOW) - vectors(trained, None)).max() > 0.01
    np.testing.assert_array_equal(vectors(trained, Inference()), vectors(trained, None))
    capsys.readouterr()


def test_neighbors_and_interpolate_infer_as_they_are_told(trained, corpus, capsys):
    """No step at all leaves random vectors, which find and generate something else."""
    random = ["--inference-steps", "0"]
    for words in (
        ["neighbors", str(trained), str(corpus), "--query", "Rain fell on the cat", "-k", "2"],
        ["interpolate", str(trained), "--from", SENTENCES[0], "--to", SENTENCES[3]],
    ):
        printed = []
        for more in ([], ["--inference", "safeguarded", "--inference-steps", "250"], random):
            assert main([*words, *more]) == 0
            printed.append(capsys.readouterr().out)
        assert printed[0] == printed[1] != printed[2]


def test_evaluate_infers_as_it_is_told_and_caches_apart(trained, tmp_path, capsys):
    """The vectors of one way to infer are not taken for those of another."""
    (tmp_path / "data" / "MR").mkdir(parents=True)
    lines = [f"{i % 2}\t{SENTENCES[i % 5]} {SENTENCES[i % 3]} {i}" for i in range(40)]
    (tmp_path / "data" / "MR" / "all.tsv").write_text("\n".join(lines) + "\n")
    words = ["evaluate", str(trained), "--data", str(tmp_path / "data"), "--cache", str(tmp_path / "cache")]
    digests = []
    for more in ([], ["--inference", "safeguarded"], SPECIFIED):
        assert main([*words, *more, "--json", str(tmp_path / "out.json")]) == 0
        digests.append(load_encoder(str(trained), inference=chosen(more)).key)
        assert digests[-1] in (tmp_path / "out.json").read_text()
    assert digests[0] == digests[1] != digests[2]
    encoder = load_encoder(str(trained), raw=True, inference=HOW)
    np.testing.assert_array_equal(encoder.encode(list(SENTENCES)), vectors(trained, HOW))
    assert json.loads((tmp_path / "out.json").read_text())
    capsys.readouterr()


def chosen(words):
    return {0: None, 2: Inference(), len(SPECIFIED): HOW}[len(words)]


def test_the_digest_tells_ways_of_inference_apart(trained):
    digests = [
        set_inference(SentenceEncoder.load(trained, "cpu", with_digest=True), how).digest
        for how in (None, Inference(), HOW, Inference(steps=8))
    ]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_options_of_inference():
    assert chosen_inference(None, None, None) is None
    assert chosen_inference("specified", 7, 0.5) == HOW
    assert chosen_inference(None, 9, None) == Inference(steps=9)
    assert chosen_inference("specified", None, None) == Inference(250, 1.0, False)
    with pytest.raises(InputError, match="inference_steps: want at least 0, got -1"):
        chosen_inference(None, -1, None)
    with pytest.raises(InputError, match=r"inference_learning_rate: want a positive number, got 0\.0"):
        chosen_inference("specified", None, 0.0)


def test_other_models_infer_nothing(other, corpus, tmp_path, capsys):
    words = ["embed", str(other), str(corpus), "--out", str(tmp_path / "x.npy"), "--inference-steps", "3"]
    assert main(words) == 2
    assert (
        "inference: want it with a model trained with --model gloss-bow or gloss-pos alone, got a "
        "QuickThoughts" in capsys.readouterr().err
    )
    with pytest.raises(InputError, match="inference: want a trained model, got word-vectors:x"):
        load_encoder("word-vectors:x", inference=HOW)
