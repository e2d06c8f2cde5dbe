"""Trainings on tables, with a tokenizer's file, and from pre-trained word vectors."""

import json
import re
import shutil
from collections import Counter
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
from fastqt.sentences.runs.model import build_model, word_tables
from fastqt.sentences.text import Vocabulary
from fastqt.sentences.train import train
from tests.shared.tokenizer_files import TOKENIZERS, word_piece
from tests.shared.trainings import assert_same_weights
from tests.shared.word_vectors import write_vectors

SMALL = {"keep_checkpoint": True, "word_dim": 6, "hidden_size": 4, "context_size": 2}
OF_TEXT = SMALL | {"batch_size": 50, "epochs": 2}
OF_TOKENS = SMALL | {"batch_size": 100, "steps": 4}


def write_table(path, columns, **options):
    pyarrow = pytest.importorskip("pyarrow", reason="the extra datasets is not installed")
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table(columns), path, **options)
    return str(path)


@pytest.fixture
def table(planted, tmp_path):
    """The planted text as a table with a further column of text."""
    lines = Path(planted[0]).read_text().split("\n")
    columns = {"body": lines, "source": ["x"] * len(lines)}
    return write_table(tmp_path / "planted.parquet", columns, row_group_size=70)


def assert_same(one, other):
    assert_same_weights(one, other)
    assert (one / "vocabulary.json").read_text() == (other / "vocabulary.json").read_text()


@pytest.mark.parametrize(
    "kind",
    [
        {"encoder": "bow"},
        pytest.param({"model": "simcse", "encoder": "gru", "context_size": 1}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_training_on_a_table_and_a_resumed_one(planted, table, tmp_path, kind):
    train(TrainConfig((planted[0],), **OF_TEXT | kind), tmp_path / "text")
    config = TrainConfig((table,), column="body", **OF_TEXT | kind)
    train(replace(config, steps=7), tmp_path / "table")
    with pytest.raises(InputError, match="cannot resume: column is 'source', but"):
        train(replace(config, column="source"), tmp_path / "table", resume=True)
    train(config, tmp_path / "table", resume=True)
    assert_same(tmp_path / "table", tmp_path / "text")


def test_a_folder_of_the_datasets_library(planted, tmp_path):
    datasets = pytest.importorskip("datasets", reason="the library datasets is not installed")
    lines = Path(planted[0]).read_text().split("\n")
    datasets.Dataset.from_dict({"text": lines}).save_to_disk(tmp_path / "data", num_shards=3)
    config = TrainConfig((str(tmp_path / "data"),), valid=str(tmp_path / "data"), valid_batches=2, **OF_TEXT)
    train(replace(config, steps=5), tmp_path / "folder")
    # What the library caches in the folder is not the corpus.
    (tmp_path / "data" / "cache-1.arrow").write_bytes(b"other")
    train(config, tmp_path / "folder", resume=True)
    train(TrainConfig((planted[0],), **OF_TEXT), tmp_path / "text")
    assert_same(tmp_path / "folder", tmp_path / "text")
    datasets.Dataset.from_dict({"text": lines[::-1]}).save_to_disk(tmp_path / "other", num_shards=3)
    for path in (tmp_path / "other").glob("data-*"):
        path.replace(tmp_path / "data" / path.name)
    with pytest.raises(InputError, match=r"cannot resume: .*data has (other text|\d+ bytes)"):
        train(replace(config, epochs=3), tmp_path / "folder", resume=True)


def test_a_column_of_text_files_is_refused(planted, tmp_path):
    with pytest.raises(InputError, match="column: want a corpus of "):
        train(TrainConfig((planted[0],), column="text", **OF_TEXT), tmp_path / "run")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("word_piece", {"encoder": "gru"}),
        pytest.param("bpe", {"encoder": "bow"}, marks=pytest.mark.slow),
        pytest.param("unigram", {"model": "simcse", "context_size": 1}, marks=pytest.mark.slow),
    ],
)
def test_a_training_with_a_tokenizer_in_two_parts_and_its_vectors(planted, tmp_path, name, kind):
    file = tmp_path / "tokenizer.json"
    file.write_text(TOKENIZERS[name]().to_str())
    config = TrainConfig((planted[0],), valid=planted[1], vocabulary=str(file), **OF_TOKENS | kind)
    train(config, tmp_path / "whole")
    train(replace(config, steps=2), tmp_path / "parts")
    file.unlink()  # the run has a copy
    copy = tmp_path / "parts" / "vocabulary.json"
    text = copy.read_text()
    copy.write_text(text + "\n")  # any other bytes
    with pytest.raises(InputError, match="cannot resume: the vocabulary in"):
        train(config, tmp_path / "parts", resume=True)
    copy.write_text(text)
    train(config, tmp_path / "parts", resume=True)
    assert_same_weights(tmp_path / "parts", tmp_path / "whole")
    encoder = SentenceEncoder.load(tmp_path / "whole", "cpu")
    assert isinstance(encoder.vocabulary, Vocabulary)
    file.write_text(TOKENIZERS[name]().to_str())
    own = Vocabulary.load(file, max_length=config.max_length)
    texts = ["topic1word2 place3", "a cat sat.", "☃"]
    assert (encoder.vocabulary.encode(texts).ids == own.encode(texts).ids).all()
    assert {len(table.weight) for table in word_tables(encoder.model)} == {len(own)}


def test_a_tokenizer_on_the_command_line(planted, tmp_path, capsys):
    run, tokenizer = str(tmp_path / "run"), tmp_path / "tokenizer.json"
    tokenizer.write_text(word_piece().to_str())
    train = ["train", planted[0], "--out", run, "--vocabulary", str(tokenizer), "--keep-checkpoint"]
    assert main([*train, "--word-dim", "6", "--batch-size", "100", "--max-length", "12"]) == 0
    tokenizer.unlink()
    assert main(["train", "--resume", "--out", run, "--epochs", "2"]) == 0
    capsys.readouterr()
    (tmp_path / "words.txt").write_text("the 1 2\nof 3 4\n")
    assert main(["expand", run, str(tmp_path / "words.txt"), "--out", str(tmp_path / "more")]) == 2
    assert "with word vectors of its own, got quickthoughts with the vocabulary of" in capsys.readouterr().err
    assert main([*train[:3], str(tmp_path / "none"), *train[4:]]) == 2
    assert "no vocabulary: " in capsys.readouterr().err


W = 6
OF_VECTORS = {"keep_checkpoint": True, "hidden_size": 8, "layers": 1, "heads": 2, "feedforward": 8}
OF_VECTORS |= {"batch_size": 48, "context_size": 1}
STILL = {**OF_VECTORS, "steps": 1, "learning_rate": 0.0}


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
    return write_vectors(tmp_path / "vectors.txt", words, vectors), dict(zip(words, vectors, strict=True))


def ids_of(run) -> dict[str, int]:
    return Vocabulary.load(run / "vocabulary.json").tokenizer.get_vocab()


@pytest.mark.thinned(3)
@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize(
    "kind",
    [
        {"encoder": "bow"},
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
    torch.manual_seed(config.seed)
    before = build_model(replace(config, vectors=None, vectors_scale=1.0, word_dim=W), len(ids))
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


def test_coverage_is_said(text, pretrained, tmp_path, capsys):
    path, vectors = pretrained
    out = tmp_path / "run"
    options = ["--vectors", str(path), "--steps", "1", "--batch-size", "48", "--vocab-size", "60"]
    assert main(["train", text, "--out", str(out), *options]) == 0
    counts = Counter(re.findall(r"\w+", Path(text).read_text()))
    covered = [word for word in ids_of(out) if word != "<unk>" and word.lower() in vectors]
    tokens, known = counts.total(), sum(counts[word] for word in covered)
    assert 0 < known < tokens
    said = f"vectors of {len(covered)} of 59 words ({len(covered) / 59:.1%}), which are {known / tokens:.1%}"
    assert said in capsys.readouterr().err
    assert json.loads((out / "config.json").read_text())["word_dim"] == W


@pytest.mark.parametrize(("encoder", "width"), [("mc-bow", 2 * (W + 7)), ("mc-gru", 2 * 2 * 6)])
def test_the_trained_channel_may_have_another_width(text, pretrained, tmp_path, encoder, width):
    settings = {**OF_VECTORS, "hidden_size": 6, "encoder": encoder, "trained_dim": 7}
    train(TrainConfig((text,), **settings, vectors=str(pretrained[0]), steps=2), tmp_path / "run")
    loaded = SentenceEncoder.load(tmp_path / "run")
    assert sorted({table.weight.shape[1] for table in word_tables(loaded.model)}) == sorted((7, W))
    assert loaded.encode(["place0 topic1word1"]).shape == (1, width)


@pytest.mark.parametrize("encoder", ["gru", "mc-bow"])
def test_a_run_stands_alone(text, pretrained, tmp_path, encoder):
    """Neither resuming it nor encoding with it reads the file again."""
    path, _ = pretrained
    config = TrainConfig((text,), **OF_VECTORS, encoder=encoder, vectors=str(path), steps=6)
    train(config, tmp_path / "whole")
    train(replace(config, steps=3), tmp_path / "parts")
    path.unlink()
    train(config, tmp_path / "parts", resume=True)
    assert_same_weights(tmp_path / "whole", tmp_path / "parts")
    assert SentenceEncoder.load(tmp_path / "parts").encode(["place0 topic1word1"]).shape[0] == 1
    with pytest.raises(InputError, match="no such file"):
        train(config, tmp_path / "new")


@pytest.mark.parametrize(
    "kind",
    [
        {"encoder": "mc-gru"},
        {"encoder": "mc-bow", "model": "simcse"},
        {"encoder": "lstm", "freeze_vectors": True},
        {"encoder": "combine", "freeze_vectors": True},
    ],
    ids=str,
)
def test_a_frozen_table_stays_and_is_stored_once(text, pretrained, tmp_path, kind):
    path, vectors = pretrained
    config = TrainConfig((text,), **OF_VECTORS, **kind, vectors=str(path), steps=5, learning_rate=0.05)
    train(replace(config, steps=1, learning_rate=0.0), tmp_path / "start")
    train(config, tmp_path / "run")
    before, after = (load_file(tmp_path / run / "model.safetensors") for run in ("start", "run"))
    has_channels = kind["encoder"].startswith("mc-")
    tables = [name for name in after if name.endswith("embedding.weight")]
    frozen = [name for name in tables if "encoders.0." in name or not has_channels]
    assert len(frozen) == (2 if kind["encoder"] == "combine" else 1)
    for name in after.keys() - {name for name in after if name.rpartition(".")[2].startswith("bias_hh")}:
        assert torch.equal(before[name], after[name]) == (name in frozen), name
    ids = ids_of(tmp_path / "run")
    lost = [row for word, row in ids.items() if word.lower() == "place5"]
    for name in frozen:
        assert np.array_equal(after[name][[ids["place3"], ids["Place3"]]], [vectors["place3"]] * 2)
        assert 0 < after[name][lost].abs().max() <= 0.1  # a word without a vector is drawn
    for name in set(tables) - set(frozen):  # the channel that is trained is drawn
        assert 0.09 < before[name].abs().max() <= 0.1
    state = load_file(tmp_path / "run" / "checkpoint.safetensors")
    assert not [name for name in state if name.startswith("optimizer") and name.endswith(tuple(frozen))]


def test_what_does_not_fit_the_file_is_refused(text, pretrained, tmp_path):
    (tmp_path / "v.txt").write_text("absent 1 2\n")
    for change, message in (
        ({"word_dim": 7}, r"word_dim: want 6, the width of .*vectors\.txt, got 7"),
        ({"encoder": "transformer", "heads": 4}, "heads: want a divisor of word_dim 6, got 4"),
        ({"vectors": "none.txt"}, r"no such file: none\.txt"),
        ({"vectors": str(tmp_path / "v.txt")}, r"vectors: want words of the vocabulary, got none of \d+ in "),
    ):
        with pytest.raises(InputError, match=message):
            train(TrainConfig((text,), **STILL | {"vectors": str(pretrained[0])} | change), tmp_path / "run")
        assert not list((tmp_path / "run").glob("*.json"))


def test_a_disk_without_room_for_a_checkpoint_is_refused_before_the_first_step(
    planted, tmp_path, monkeypatch
):
    config = TrainConfig((planted[0],), word_dim=8, batch_size=40, context_size=1, steps=1)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(
        InputError, match=r"run: want 1 MiB of free disk for the model and a checkpoint, got 0"
    ):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    monkeypatch.undo()
    train(config, tmp_path / "again")
