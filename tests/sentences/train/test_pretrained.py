"""Trainings from pre-trained word vectors: what starts where, what moves, and what a run is left with."""

import json
import lzma
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from fastqt.errors import InputError
from fastqt.sentences.cli import main
from fastqt.sentences.inference.encoder import SentenceEncoder
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.runs.model import build_model
from fastqt.sentences.runs.word_tables import word_tables
from fastqt.sentences.text import Vocabulary
from fastqt.sentences.train import train

W = 6
SMALL = {
    "keep_checkpoint": True,
    "hidden_size": 8,
    "layers": 1,
    "heads": 2,
    "feedforward": 8,
    "batch_size": 48,
    "context_size": 1,
}
STILL = {**SMALL, "steps": 1, "learning_rate": 0.0}
DATA = Path(__file__).parents[4] / "shared" / "data"


@pytest.fixture
def text(planted, tmp_path):
    """The planted text, in which every third line begins with a capital letter."""
    lines = Path(planted[0]).read_text().split("\n")
    lines[::3] = [line.capitalize() for line in lines[::3]]
    path = tmp_path / "text.txt"
    path.write_text("\n".join(lines))
    return str(path)


@pytest.fixture
def pretrained(tmp_path):
    """A file of vectors in lower case, for most topics and all places but one, and the vectors by word."""
    words = [f"topic{topic}word{word}" for topic in range(20) for word in range(3)]
    words += [f"place{place}" for place in range(5)] + ["absent", "<unk>"]
    vectors = np.random.default_rng(3).normal(size=(len(words), W)).astype(np.float32)
    np.savez(tmp_path / "vectors.npz", words=np.array(words), vectors=vectors)
    return tmp_path / "vectors.npz", dict(zip(words, vectors, strict=True))


def ids_of(run) -> dict[str, int]:
    return Vocabulary.load(run / "vocabulary.json").tokenizer.get_vocab()


def drawn(config: TrainConfig, V: int) -> nn.Module:
    """The model of the same settings, without vectors."""
    torch.manual_seed(config.seed)
    return build_model(replace(config, vectors=None, vectors_scale=1.0, word_dim=W), V)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize(
    "kind",
    [
        {"encoder": "bow"},
        {"encoder": "gru"},
        {"encoder": "bilstm"},
        {"encoder": "transformer"},
        {"encoder": "combine"},
        {"model": "simcse", "encoder": "bigru"},
        {"model": "mixcse", "encoder": "bow"},
    ],
    ids=str,
)
def test_words_take_their_vectors_and_others_are_drawn_as_before(text, pretrained, tmp_path, kind, scale):
    path, vectors = pretrained
    config = TrainConfig((text,), **STILL, **kind, vectors=str(path), vectors_scale=scale)
    train(config, tmp_path / "run")
    ids = ids_of(tmp_path / "run")
    before = drawn(config, len(ids))
    after = SentenceEncoder.load(tmp_path / "run").model
    tables = dict(zip(word_tables(before), word_tables(after), strict=True))
    assert len(tables) == {"quickthoughts": 2}.get(config.model, 1) * (1 + (config.encoder == "combine"))
    for old, new in tables.items():
        for word, row in ids.items():
            has_one = word != "<unk>" and word.lower() in vectors
            wanted = scale * vectors[word.lower()] if has_one else old.weight[row].detach().numpy()
            assert np.array_equal(new.weight[row].detach().numpy(), wanted.astype(np.float32)), word
    others = {id(table.weight) for table in tables}
    for old, new in zip(before.parameters(), after.parameters(), strict=True):
        assert id(old) in others or torch.equal(old, new)


def test_a_cased_word_takes_its_own_vector_first(text, pretrained, tmp_path):
    _, vectors = pretrained
    lines = [f"{word} {' '.join(map(str, row.tolist()))}" for word, row in vectors.items()]
    (tmp_path / "v.txt").write_text("\n".join([*lines, f"Place0 {' '.join(['7'] * W)}"]))
    train(TrainConfig((text,), **STILL, vectors=str(tmp_path / "v.txt")), tmp_path / "run")
    ids, (table, _) = ids_of(tmp_path / "run"), word_tables(SentenceEncoder.load(tmp_path / "run").model)
    assert table.weight[ids["Place0"]].tolist() == [7] * W
    assert np.array_equal(table.weight[ids["place0"]].detach(), vectors["place0"])


def test_coverage_is_said_and_stored(text, pretrained, tmp_path, capsys):
    path, vectors = pretrained
    out = tmp_path / "run"
    options = ["--vectors", str(path), "--steps", "1", "--batch-size", "48", "--vocab-size", "60"]
    assert main(["train", text, "--out", str(out), *options]) == 0
    counts = Counter(re.findall(r"\w+", Path(text).read_text()))
    ids = ids_of(out)
    covered = [word for word in ids if word != "<unk>" and word.lower() in vectors]
    stored = json.loads((out / "vectors.json").read_text())
    assert stored["vectors"] == str(path)
    assert (stored["words"], stored["words_with_a_vector"]) == (59, len(covered))
    assert stored["tokens"] == counts.total()
    assert stored["tokens_with_a_vector"] == sum(counts[word] for word in covered)
    assert 0 < stored["tokens_with_a_vector"] < stored["tokens"]
    assert (stored["width"], stored["scale"], set(stored["sha256"])) == (W, 1.0, {"vectors.npz"})
    share = stored["tokens_with_a_vector"] / stored["tokens"]
    said = (
        f"vectors of {len(covered)} of 59 words ({len(covered) / 59:.1%}), which are {share:.1%} of the corp"
    )
    assert said in capsys.readouterr().err
    assert json.loads((out / "config.json").read_text())["word_dim"] == W


@pytest.mark.parametrize(("encoder", "width"), [("mc-bow", 2 * (W + 7)), ("mc-gru", 2 * 2 * 6)])
def test_the_trained_channel_may_have_another_width(text, pretrained, tmp_path, encoder, width):
    settings = {**SMALL, "hidden_size": 6, "encoder": encoder, "trained_dim": 7}
    train(TrainConfig((text,), **settings, vectors=str(pretrained[0]), steps=2), tmp_path / "run")
    loaded = SentenceEncoder.load(tmp_path / "run")
    assert sorted({table.weight.shape[1] for table in word_tables(loaded.model)}) == sorted((7, W))
    assert loaded.encode(["place0 topic1word1"]).shape == (1, width)


@pytest.mark.parametrize("encoder", ["gru", "mc-bow"])
def test_a_run_stands_alone(text, pretrained, tmp_path, encoder):
    """Neither resuming it nor encoding with it reads the file again."""
    path, _ = pretrained
    config = TrainConfig((text,), **SMALL, encoder=encoder, vectors=str(path), steps=6)
    train(config, tmp_path / "whole")
    train(replace(config, steps=3), tmp_path / "parts")
    path.unlink()
    train(config, tmp_path / "parts", resume=True)
    whole, parts = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert SentenceEncoder.load(tmp_path / "parts").encode(["place0 topic1word1"]).shape[0] == 1
    with pytest.raises(InputError, match="no such file"):
        train(config, tmp_path / "new")


@pytest.mark.parametrize(
    "kind",
    [
        {"encoder": "mc-bow"},
        {"encoder": "mc-gru"},
        {"encoder": "mc-bigru", "model": "simcse"},
        {"encoder": "lstm", "freeze_vectors": True},
        {"encoder": "combine", "freeze_vectors": True},
    ],
    ids=str,
)
def test_a_frozen_table_stays_and_is_stored_once(text, pretrained, tmp_path, kind):
    path, vectors = pretrained
    config = TrainConfig((text,), **SMALL, **kind, vectors=str(path), steps=5, learning_rate=0.05)
    train(replace(config, steps=1, learning_rate=0.0), tmp_path / "start")
    train(config, tmp_path / "run")
    before, after = (load_file(tmp_path / run / "model.safetensors") for run in ("start", "run"))
    frozen = [name for name in after if name.endswith("embedding.weight") and name_is_frozen(name, kind)]
    assert len(frozen) == (2 if kind["encoder"] == "combine" else 1)
    for name in after.keys() - {name for name in after if name.rpartition(".")[2].startswith("bias_hh")}:
        assert torch.equal(before[name], after[name]) == (name in frozen), name
    ids = ids_of(tmp_path / "run")
    for name in frozen:
        rows = after[name][[ids["place3"], ids["Place3"]]]
        assert np.array_equal(rows, [vectors["place3"]] * 2)
    model = SentenceEncoder.load(tmp_path / "run").model
    tables = [table.weight for table in word_tables(model) if not table.weight.requires_grad]
    assert len(tables) == len(frozen)
    for quickthoughts in getattr(model, "models", [model] if hasattr(model, "query_encoder") else []):
        f, g = quickthoughts.query_encoder, quickthoughts.candidate_encoder
        f, g = (getattr(each, "encoders", [each])[0] for each in (f, g))
        assert f.embedding is g.embedding
    state = load_file(tmp_path / "run" / "checkpoint.safetensors")
    assert not [name for name in state if name.startswith("optimizer") and name.endswith(tuple(frozen))]


def name_is_frozen(name: str, kind) -> bool:
    return "encoders.0." in name if kind["encoder"].startswith("mc-") else True


def test_the_channel_that_is_trained_is_drawn(text, pretrained, tmp_path):
    path, _ = pretrained
    config = TrainConfig((text,), **STILL, encoder="mc-gru", vectors=str(path))
    train(config, tmp_path / "run")
    weights = load_file(tmp_path / "run" / "model.safetensors")
    for encoder in ("query_encoder", "candidate_encoder"):
        trained = weights[f"{encoder}.encoders.1.embedding.weight"]
        assert 0.09 < trained.abs().max() <= 0.1
    frozen = weights["query_encoder.encoders.0.embedding.weight"]
    lost = [row for word, row in ids_of(tmp_path / "run").items() if word.lower() == "place5"]
    assert len(lost) == 2
    assert (frozen[lost].abs() <= 0.1).all()
    assert frozen[lost].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"word_dim": 7}, r"word_dim: want 6, the width of .*vectors\.npz, got 7"),
        ({"encoder": "transformer", "heads": 4}, "heads: want a divisor of word_dim 6, got 4"),
        ({"vectors": "none.npz"}, r"no such file: none\.npz"),
    ],
)
def test_what_does_not_fit_the_file_is_refused(text, pretrained, tmp_path, change, message):
    config = TrainConfig((text,), **{**SMALL, "vectors": str(pretrained[0]), **change})
    with pytest.raises(InputError, match=message):
        train(config, tmp_path / "run")
    assert not list((tmp_path / "run").glob("*.json"))


def test_vectors_of_no_word_are_refused(text, tmp_path):
    (tmp_path / "v.txt").write_text("absent 1 2\n")
    with pytest.raises(
        InputError, match=r"vectors: want words of the vocabulary, got none of \d+ in .*v\.txt"
    ):
        train(TrainConfig((text,), **STILL, vectors=str(tmp_path / "v.txt")), tmp_path / "run")


@pytest.mark.skipif(not DATA.is_dir(), reason="the novels and GloVe's most frequent words are not here")
@pytest.mark.parametrize("encoder", ["bow", "mc-bow"])
def test_novels_with_glove(tmp_path, capsys, encoder):
    corpus, vectors = DATA / "corpus" / "valid.txt.xz", DATA / "vectors" / "glove.6B.50d.top2446.txt.xz"
    with lzma.open(corpus, "rt", encoding="utf-8") as file:
        lines = [line for _, line in zip(range(600), file, strict=False)]
    (tmp_path / "novel.txt").write_text("".join(lines))
    (tmp_path / "subj").mkdir()
    names = {name: str(tmp_path / name) for name in ("novel.txt", "run", "x.npy")}
    options = ["--vectors", str(vectors), "--encoder", encoder, "--batch-size", "100", "--steps", "5"]
    assert main(["train", names["novel.txt"], "--out", names["run"], *options]) == 0
    stored = json.loads((tmp_path / "run" / "vectors.json").read_text())
    assert stored["tokens_with_a_vector"] > 0.7 * stored["tokens"]
    assert main(["embed", names["run"], names["novel.txt"], "--out", names["x.npy"]]) == 0
    width = 2 * 50 * (1 + (encoder == "mc-bow"))
    assert np.load(names["x.npy"]).shape == (len(lines), width)
    query = ["--query", "She looked at him.", "-k", "1"]
    assert main(["neighbors", names["run"], names["novel.txt"], *query]) == 0
    assert "of the corpus's tokens" in capsys.readouterr().err
