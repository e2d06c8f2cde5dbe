"""A Hugging Face checkpoint as a sentence encoder."""

import json
import shutil
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

import fastqt
from fastqt.errors import InputError
from fastqt.integrations.huggingface import POOLINGS, HuggingFaceEncoder
from fastqt.nn import QuickThoughts
from fastqt.sentences.inference.encoder import SentenceEncoder
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.train.loop import train
from tests.shared.tolerances import FLOAT32, REORDERED_FLOAT32, relative

transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")

TEXT = ["the cat sat on a mat .", "cats", "a cat .", "the mat"]
each_pooling = pytest.mark.parametrize("pooling", POOLINGS)


def vector_by_transformers(folder, sentence: str, pooling: str) -> torch.Tensor:
    """The vector of one sentence, computed by transformers alone without padding."""
    model = transformers.AutoModel.from_pretrained(folder).eval()
    output = model(**transformers.AutoTokenizer.from_pretrained(folder)(sentence, return_tensors="pt"))
    if pooling == "cls":
        return output.pooler_output[0]
    return output.last_hidden_state[0, 0] if pooling == "cls_before_pooler" else output[0][0].mean(0)


@each_pooling
def test_vectors_equal_those_of_transformers(checkpoint, pooling):
    encoder = HuggingFaceEncoder(checkpoint, pooling=pooling)
    vectors = encoder.encode(TEXT, batch_size=3)
    assert vectors.shape == (len(TEXT), encoder.embedding_dim) == (4, 8)
    assert vectors.dtype == np.float32
    for sentence, vector in zip(TEXT, vectors, strict=True):
        assert relative(vector, vector_by_transformers(checkpoint, sentence, pooling)) <= FLOAT32
    unit = encoder.encode(TEXT, normalize=True)
    assert relative(unit, vectors / np.linalg.norm(vectors, axis=1, keepdims=True)) <= FLOAT32


def test_tokens_equal_those_of_transformers(checkpoint):
    tokens, lengths = HuggingFaceEncoder(checkpoint).tokenize(TEXT[:2])
    assert lengths.tolist() == [9, 4]
    assert tokens[1, :4].tolist() == [2, 5, 10, 3]  # [CLS] cat ##s [SEP]
    assert HuggingFaceEncoder(checkpoint, max_length=5).tokenize(TEXT)[1].tolist() == [5, 4, 5, 4]


@each_pooling
def test_padding_changes_neither_vectors_nor_gradients(checkpoint, pooling):
    encoder = HuggingFaceEncoder(checkpoint, pooling=pooling).eval()
    tokens, lengths = encoder.tokenize(TEXT)
    junk = torch.where(torch.arange(tokens.shape[1]) < lengths.unsqueeze(1), tokens, -1)
    wide = torch.cat([junk, torch.full((len(junk), 20), 99)], dim=1)
    upstream = torch.randn(len(tokens), encoder.embedding_dim)
    results = []
    for padded in (tokens, wide):
        encoder.zero_grad()
        vectors = encoder(padded, lengths)
        (vectors * upstream).sum().backward()
        results.append([vectors, *(p.grad for p in encoder.parameters() if p.grad is not None)])
    assert all(map(torch.equal, *results))


@each_pooling
def test_empty_sentence_gives_zeros(checkpoint, pooling):
    encoder = HuggingFaceEncoder(checkpoint, pooling=pooling).eval()
    tokens, lengths = encoder.tokenize(TEXT)
    lengths[1] = 0
    vectors = encoder(tokens, lengths)
    assert not vectors[1].any()
    kept = [0, 2, 3]
    assert relative(vectors[kept], encoder(tokens[kept], lengths[kept])) <= REORDERED_FLOAT32
    vectors.sum().backward()
    assert all(p.grad.isfinite().all() for p in encoder.parameters() if p.grad is not None)
    assert torch.equal(encoder(tokens, torch.zeros_like(lengths)), torch.zeros(4, 8))
    assert encoder(tokens[:0], lengths[:0]).shape == (0, 8)


def test_simcse_training_lowers_the_loss_and_save_keeps_the_weights(checkpoint, tmp_path):
    torch.manual_seed(0)
    encoder = HuggingFaceEncoder(checkpoint)
    encoder.train()
    optimizer = torch.optim.Adam(encoder.parameters(), lr=3e-3)
    tokens, lengths = encoder.tokenize(TEXT)

    def loss():
        return fastqt.simcse_loss(encoder(tokens, lengths), encoder(tokens, lengths))

    def mean_loss():
        with torch.no_grad():
            return sum(loss().item() for _ in range(10)) / 10

    before = mean_loss()
    for _ in range(40):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    assert mean_loss() < 0.7 * before
    vectors = encoder.encode(TEXT)
    assert encoder.training  # encode restores the mode
    encoder.save(tmp_path)
    assert np.array_equal(HuggingFaceEncoder(tmp_path).encode(TEXT), vectors)
    assert not np.array_equal(HuggingFaceEncoder(checkpoint).encode(TEXT), vectors)


def test_trained_run_loads_without_its_checkpoint(checkpoint, tmp_path):
    corpus, folder, run = tmp_path / "corpus.txt", tmp_path / "bert", tmp_path / "run"
    corpus.write_text("\n".join(TEXT * 8) + "\n")
    shutil.copytree(checkpoint, folder)
    config = TrainConfig(
        (str(corpus),), model="mixcse", encoder="huggingface", checkpoint=str(folder), batch_size=8
    )
    assert config.learning_rate == 3e-5
    config = replace(config, learning_rate=1e-2, epochs=3)
    assert train(replace(config, steps=5, keep_checkpoint=True), run).step == 5
    assert train(config, run, resume=True).step == 12
    shutil.rmtree(folder)
    encoder = SentenceEncoder.load(run)
    vectors = encoder.encode(TEXT)
    assert vectors.shape == (4, 8)
    assert not np.allclose(vectors, HuggingFaceEncoder(checkpoint).encode(TEXT, normalize=True), atol=0.1)
    # An uninterrupted run gives the same vectors. With dropout=0.0, which concerns sentence vectors only, the
    # two views still differ, because the dropout in the checkpoint's layers is active.
    assert train(replace(config, checkpoint=str(checkpoint)), tmp_path / "whole").step == 12
    assert np.array_equal(SentenceEncoder.load(tmp_path / "whole").encode(TEXT), vectors)
    still = replace(config, checkpoint=str(checkpoint), dropout=0.0, steps=1)
    train(still, tmp_path / "still")
    line = json.loads((tmp_path / "still" / "metrics.jsonl").read_text())
    assert line["alignment"] > 1e-3


def test_checkpoint_option_belongs_to_the_huggingface_encoder(checkpoint, tmp_path):
    with pytest.raises(InputError, match="checkpoint: want with encoder huggingface alone, got None"):
        TrainConfig(("x",), encoder="huggingface")
    with pytest.raises(InputError, match="checkpoint: want with encoder huggingface alone, got 'y'"):
        TrainConfig(("x",), checkpoint="y")


def test_loaded_model_can_encode_for_quickthoughts(checkpoint):
    loaded = HuggingFaceEncoder(checkpoint)
    same = HuggingFaceEncoder(loaded.model, loaded.tokenizer)
    assert np.array_equal(same.encode(TEXT), loaded.encode(TEXT))
    model = QuickThoughts(same, HuggingFaceEncoder(checkpoint, pooling="mean"))
    assert model.encode(*same.tokenize(TEXT)).shape == (4, 16)


def test_no_sentences_give_no_vectors(checkpoint):
    assert HuggingFaceEncoder(checkpoint).encode([]).shape == (0, 8)


def test_missing_library_error_names_the_extra(checkpoint, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install 'fastqt\[hf\]'"):
        HuggingFaceEncoder(checkpoint)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (("no/such/folder",), {}, InputError, "model: want the directory of a checkpoint"),
        (("{tmp_path}",), {}, InputError, "holds no checkpoint"),
        (("{tmp_path}",), {"pooling": "max"}, ValueError, "pooling: want one of 'cls'.*got 'max'"),
        (("{tmp_path}",), {"max_length": 0}, ValueError, "max_length: want at least 1, got 0"),
        ((torch.nn.Linear(2, 2),), {}, ValueError, "tokenizer: want the loaded model's, got None"),
        ((torch.nn.Linear(2, 2), object()), {}, ValueError, "a Linear, which has no pooler, got 'cls'"),
    ],
)
def test_invalid_argument_raises(tmp_path, arguments, options, error, message):
    arguments = [x.format(tmp_path=tmp_path) if isinstance(x, str) else x for x in arguments]
    with pytest.raises(error, match=message):
        HuggingFaceEncoder(*arguments, **options)
