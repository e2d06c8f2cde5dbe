"""Models too large for the machine are refused before memory is taken for them."""

import json

import pytest
import torch

from fastqt.errors import InputError
from fastqt.sentences.inference.encoder import SentenceEncoder
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.runs.model import build_model, outline
from fastqt.sentences.text import limits
from fastqt.sentences.train import train

SMALL = {"word_dim": 8, "hidden_size": 4, "batch_size": 48, "steps": 1}


@pytest.mark.parametrize(
    "settings",
    [
        {"word_dim": 1 << 24},
        {"encoder": "gru", "hidden_size": 1 << 24},
        {"encoder": "bilstm", "hidden_size": 1 << 24},
        {"encoder": "transformer", "feedforward": 1 << 24, "word_dim": 1 << 10, "heads": 1, "layers": 9},
        {"model": "gloss-pos", "word_dim": 1 << 12, "max_length": 1 << 24},
    ],
    ids=str,
)
def test_a_model_larger_than_memory_is_refused_with_its_size(settings):
    config = TrainConfig(("x",), **settings)
    with pytest.raises(InputError, match=r"size of the model, of which .* bytes, got [\d,]{14,}$"):
        build_model(config, 50_000, sentences=3)


def test_settings_that_do_not_fit_the_weights_take_no_memory(planted, tmp_path, monkeypatch):
    train(TrainConfig((planted[0],), **SMALL), tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"word_dim": 1 << 20}))
    built = []
    monkeypatch.setattr("fastqt.sentences.runs.model.check_size", built.append)
    with pytest.raises(InputError, match=r"does not fit its config\.json: the shape of .* differs"):
        SentenceEncoder.load(tmp_path)
    assert not built


@pytest.mark.parametrize("encoder", ["bow", "gru", "bilstm", "transformer", "combine", "mc-bow", "mc-bigru"])
def test_an_outline_draws_no_random_numbers(encoder):
    """The seed of a training then gives the weights that it always gave."""
    vectors = "v.npz" if encoder.startswith("mc-") else None
    config = TrainConfig(("x",), encoder=encoder, heads=2, vectors=vectors, **SMALL)
    before = torch.get_rng_state()
    shapes = {name: tensor.shape for name, tensor in outline(config, 9).state_dict().items()}
    assert torch.equal(torch.get_rng_state(), before)
    model = build_model(config, 9)
    assert shapes == {name: tensor.shape for name, tensor in model.state_dict().items()}


def test_half_of_the_memory_is_the_limit(monkeypatch):
    monkeypatch.setattr(limits, "machine_memory", lambda: 2000)
    limits.check_bytes(1000, "x")
    with pytest.raises(
        InputError, match="x: want at most half of this machine's memory, 1,000 bytes, got 1,001"
    ):
        limits.check_bytes(1001, "x")
