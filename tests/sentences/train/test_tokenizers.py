"""Trainings whose vocabulary is a tokenizer file: trained, resumed, loaded again and used."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fastqt.errors import InputError
from fastqt.sentences.cli import main
from fastqt.sentences.inference.encoder import SentenceEncoder
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.text import TokenizerVocabulary
from fastqt.sentences.train import train
from tests.shared.tokenizer_files import TOKENIZERS, word_piece

SMALL = {
    "keep_checkpoint": True,
    "word_dim": 6,
    "hidden_size": 4,
    "batch_size": 100,
    "context_size": 2,
    "steps": 4,
}


@pytest.fixture
def tokenizer(tmp_path):
    """The path of a WordPiece file."""
    path = tmp_path / "tokenizer.json"
    path.write_text(word_piece().to_str())
    return str(path)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param("bpe", {"encoder": "bow"}, marks=pytest.mark.slow),
        ("word_piece", {"encoder": "gru", "special_tokens": "add"}),
        pytest.param(
            "unigram",
            {"model": "simcse", "encoder": "transformer", "layers": 1, "heads": 2, "context_size": 1},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_training_in_two_parts_and_its_vectors(planted, tmp_path, name, kind):
    file = tmp_path / "tokenizer.json"
    file.write_text(TOKENIZERS[name]().to_str())
    config = TrainConfig((planted[0],), valid=planted[1], vocabulary=str(file), **SMALL | kind)
    train(config, tmp_path / "whole")
    train(replace(config, steps=2), tmp_path / "parts")
    file.unlink()  # the run has a copy
    train(config, tmp_path / "parts", resume=True)
    whole, parts = (load_file(tmp_path / run / "model.safetensors") for run in ("whole", "parts"))
    assert all(torch.equal(parts[each], whole[each]) for each in whole)
    encoder = SentenceEncoder.load(tmp_path / "whole", "cpu")
    assert isinstance(encoder.vocabulary, TokenizerVocabulary)
    file.write_text(TOKENIZERS[name]().to_str())
    options = {"special_tokens": config.special_tokens, "max_length": config.max_length}
    own = TokenizerVocabulary.load(file, **options)
    texts = ["topic1word2 place3", "a cat sat.", "☃"]
    assert (encoder.vocabulary.encode(texts).ids == own.encode(texts).ids).all()
    tables = [tensor for each, tensor in whole.items() if each.endswith("embedding.weight")]
    assert tables
    assert {len(table) for table in tables} == {len(own)}


def test_the_command_line(planted, tokenizer, tmp_path, capsys):
    run, vectors = str(tmp_path / "run"), tmp_path / "v.npy"
    sizes = ["--word-dim", "6", "--batch-size", "100", "--max-length", "12"]
    assert (
        main(["train", planted[0], "--out", run, "--vocabulary", tokenizer, "--keep-checkpoint", *sizes]) == 0
    )
    Path(tokenizer).unlink()
    assert main(["embed", run, planted[1], "--out", str(vectors)]) == 0
    lines = Path(planted[1]).read_text().split("\n")
    wanted = SentenceEncoder.load(run, "cpu").encode([line for line in lines if line])
    found = np.load(vectors)
    assert found[[i for i, line in enumerate(lines) if line]] == pytest.approx(wanted, abs=1e-6)
    assert main(["neighbors", run, planted[1], "--query", "place1 topic2", "-k", "1"]) == 0
    assert main(["train", "--resume", "--out", run, "--epochs", "2"]) == 0
    capsys.readouterr()
    (tmp_path / "words.txt").write_text("the 1 2\nof 3 4\n")
    assert main(["expand", run, str(tmp_path / "words.txt"), "--out", str(tmp_path / "more")]) == 2
    assert "with word vectors of its own, got quickthoughts with the vocabulary of" in capsys.readouterr().err


def test_another_file_is_not_resumed_with(planted, tokenizer, tmp_path):
    config = TrainConfig((planted[0],), vocabulary=tokenizer, **SMALL)
    train(replace(config, steps=2), tmp_path / "run")
    path = tmp_path / "run" / "vocabulary.json"
    state = json.loads(path.read_text())
    state["model"]["vocab"]["more"] = len(state["model"]["vocab"])
    path.write_text(json.dumps(state))
    with pytest.raises(InputError, match="cannot resume: the vocabulary in"):
        train(config, tmp_path / "run", resume=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"encoder": "huggingface", "checkpoint": "c"}, "vocabulary: want none with encoder huggingface"),
        ({"model": "gloss-bow"}, "vocabulary: want none with model gloss"),
        ({"vocabulary": None, "special_tokens": "add"}, "special_tokens: want it with a vocabulary alone"),
        ({"unknown": "drop", "special_tokens": "add"}, "unknown: want 'keep' where special_tokens is 'add'"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        TrainConfig(("corpus.txt",), **{"vocabulary": "tokenizer.json", **settings})


def test_a_missing_file_is_refused(planted, tmp_path):
    config = TrainConfig((planted[0],), vocabulary=str(tmp_path / "none.json"), **SMALL)
    with pytest.raises(InputError, match=r"no vocabulary: .*none\.json is missing"):
        train(config, tmp_path / "run")
