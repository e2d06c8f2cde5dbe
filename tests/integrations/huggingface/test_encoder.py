"""A Hugging Face checkpoint as a sentence encoder."""

import json
import shutil
import sys
import threading
from dataclasses import replace
from functools import partial

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
from tests.shared.threads import Switching, in_threads
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


def modes(encoder):
    return [module.training for module in encoder.modules()]


def test_each_module_has_its_own_mode_after_encode(checkpoint):
    """Also where it raises. A user may keep a part of a model in evaluation mode while the rest trains."""
    encoder = HuggingFaceEncoder(checkpoint).train()
    encoder.model.embeddings.eval()
    wanted = modes(encoder)
    vectors = encoder.encode(TEXT)
    assert modes(encoder) == wanted
    assert np.array_equal(encoder.encode(TEXT), vectors)  # without dropout
    encoder.model.encoder.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        encoder.encode(TEXT)
    assert modes(encoder) == wanted


def test_modes_where_one_thread_ends_while_another_one_encodes(checkpoint):
    """The second thread begins while the first is in a batch, and is in a batch itself until that ended."""
    encoder = HuggingFaceEncoder(checkpoint).train()
    wanted, before = encoder.encode(TEXT, batch_size=1), modes(encoder)
    inside, ended = threading.Event(), threading.Event()

    def wait(*_):
        if threading.current_thread() is second and not inside.is_set():
            inside.set()
            ended.wait(10)
        elif not second.ident:
            second.start()
            inside.wait(10)

    vectors = []
    second = threading.Thread(target=lambda: vectors.append(encoder.encode(TEXT, batch_size=1)))
    encoder.model.register_forward_hook(wait)
    vectors.append(encoder.encode(TEXT, batch_size=1))
    ended.set()
    second.join()
    assert len(vectors) == 2
    for each in vectors:
        assert relative(each, wanted) <= REORDERED_FLOAT32
    assert modes(encoder) == before


def test_a_thread_tokenizes_while_another_one_is_about_to(checkpoint):
    """transformers sets a tokenizer's truncation before it encodes, and another thread wants another one."""
    long, short = (HuggingFaceEncoder(checkpoint, max_length=length) for length in (16, 3))
    short.tokenizer = tokenizer = long.tokenizer
    wanted = [each.tokenize(TEXT)[1].tolist() for each in (short, long)]
    lengths = []
    tokenizer._tokenizer = Switching(
        tokenizer._tokenizer, "encode_batch", lambda: lengths.append(short.tokenize(TEXT)[1].tolist())
    )
    last = long.tokenize(TEXT)[1].tolist()
    tokenizer._tokenizer.finish()
    assert [*lengths, last] == [wanted[0], wanted[0], wanted[1]]


@pytest.mark.slow
def test_many_threads_encode(checkpoint):
    encoder = HuggingFaceEncoder(checkpoint).train()
    calls = [[TEXT[n % 4], TEXT[n % 3], " ".join(TEXT)] for n in range(160)]
    wanted = [encoder.encode(call, batch_size=2) for call in calls]
    for each, vectors in zip(
        in_threads([partial(encoder.encode, call, batch_size=2) for call in calls]), wanted, strict=True
    ):
        assert relative(each, vectors) <= REORDERED_FLOAT32
    assert all(modes(encoder))


def test_one_text_has_one_vector_and_no_text_none(checkpoint):
    encoder = HuggingFaceEncoder(checkpoint)
    assert np.array_equal(encoder.encode(TEXT[0]), encoder.encode(TEXT[:1])[0])
    assert encoder.encode([]).shape == (0, 8)
    tokens, lengths = encoder.tokenize([])
    assert encoder(tokens, lengths).shape == (0, 8)
    with pytest.raises(TypeError, match="sentences: want a list of texts, got 'a cat'"):
        encoder.tokenize("a cat")
    with pytest.raises(InputError, match=r"sentences: want text in UTF-8, got 'a \\ud800'"):
        encoder.encode(["a \ud800"])
    with pytest.raises(ValueError, match="batch_size: want at least 1, got 0"):
        encoder.encode(TEXT, batch_size=0)
