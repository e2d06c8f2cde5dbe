"""A training on tables has the bits of one on a text file with the same sentences, also when resumed."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fastqt.errors import InputError
from fastqt.sentences.cli import main
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.train import train

pa = pytest.importorskip("pyarrow", reason="the extra datasets is not installed")
import pyarrow.parquet as pq  # noqa: E402  # after the skip

SMALL = {
    "keep_checkpoint": True,
    "word_dim": 6,
    "hidden_size": 4,
    "batch_size": 50,
    "context_size": 2,
    "epochs": 2,
}
KINDS = (
    {"encoder": "bow"},
    pytest.param({"model": "simcse", "encoder": "gru", "context_size": 1}, marks=pytest.mark.slow),
)


def weights(run):
    return load_file(run / "model.safetensors")


def assert_same(one, other):
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert (one / "vocabulary.json").read_text() == (other / "vocabulary.json").read_text()


@pytest.fixture
def table(planted, tmp_path):
    """The planted text as a table with a further column of text."""
    lines = Path(planted[0]).read_text().split("\n")
    path = tmp_path / "planted.parquet"
    columns = {"body": lines, "source": ["x"] * len(lines)}
    pq.write_table(pa.table(columns), path, row_group_size=70)
    return str(path)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_training_on_a_table_and_a_resumed_one(planted, table, tmp_path, kind):
    train(TrainConfig((planted[0],), **SMALL | kind), tmp_path / "text")
    config = TrainConfig((table,), column="body", **SMALL | kind)
    train(replace(config, steps=7), tmp_path / "table")
    train(config, tmp_path / "table", resume=True)
    assert_same(tmp_path / "table", tmp_path / "text")


@pytest.mark.slow
def test_documents_by_a_column(planted, tmp_path):
    documents = Path(planted[0]).read_text().split("\n\n")
    rows = [(line, number) for number, text in enumerate(documents) for line in text.split("\n")]
    path = tmp_path / "planted.parquet"
    pq.write_table(pa.table({"text": [row[0] for row in rows], "book": [row[1] for row in rows]}), path)
    train(TrainConfig((planted[0],), **SMALL), tmp_path / "text")
    train(TrainConfig((str(path),), document_column="book", **SMALL), tmp_path / "books")
    assert_same(tmp_path / "books", tmp_path / "text")
    train(TrainConfig((str(path),), **SMALL), tmp_path / "one")
    one, text = weights(tmp_path / "one"), weights(tmp_path / "text")
    assert not all(torch.equal(one[name], text[name]) for name in text)


def test_a_folder_of_the_datasets_library(planted, tmp_path):
    datasets = pytest.importorskip("datasets", reason="the library datasets is not installed")
    lines = Path(planted[0]).read_text().split("\n")
    datasets.Dataset.from_dict({"text": lines}).save_to_disk(tmp_path / "data", num_shards=3)
    config = TrainConfig((str(tmp_path / "data"),), valid=str(tmp_path / "data"), valid_batches=2, **SMALL)
    train(replace(config, steps=5), tmp_path / "folder")
    # What the library caches in the folder is not the corpus.
    (tmp_path / "data" / "cache-1.arrow").write_bytes(b"other")
    train(config, tmp_path / "folder", resume=True)
    train(TrainConfig((planted[0],), **SMALL), tmp_path / "text")
    assert_same(tmp_path / "folder", tmp_path / "text")
    datasets.Dataset.from_dict({"text": lines[::-1]}).save_to_disk(tmp_path / "other", num_shards=3)
    for path in (tmp_path / "other").glob("data-*"):
        path.replace(tmp_path / "data" / path.name)
    with pytest.raises(InputError, match=r"cannot resume: .*data has (other text|\d+ bytes)"):
        train(replace(config, epochs=3), tmp_path / "folder", resume=True)


def test_another_column_is_not_resumed_with(table, tmp_path):
    config = TrainConfig((table,), column="body", **SMALL)
    train(replace(config, steps=2), tmp_path / "run")
    with pytest.raises(InputError, match="cannot resume: column is 'source', but"):
        train(replace(config, column="source"), tmp_path / "run", resume=True)


@pytest.mark.parametrize("name", ["column", "document_column"])
def test_a_column_of_text_files_is_refused(planted, tmp_path, name):
    with pytest.raises(InputError, match=f"^{name}: want a corpus in .parquet or .arrow files"):
        train(TrainConfig((planted[0],), **{name: "text"}, **SMALL), tmp_path / "run")


def test_the_command_line(planted, table, tmp_path, capsys):
    command = ["train", table, "--out", str(tmp_path / "run"), "--steps", "2", "--batch-size", "50"]
    assert main([*command, "--column", "words"]) == 2
    assert capsys.readouterr().err == (f"fastqt: {table}: column 'words': want one of body, source\n")
    assert main([*command, "--column", "body", "--word-dim", "6"]) == 0
    assert main(["neighbors", str(tmp_path / "run"), planted[1], "--query", "place1", "-k", "1"]) == 0
