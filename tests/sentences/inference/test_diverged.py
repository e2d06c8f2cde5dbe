"""A model that diverged, or whose vectors are not finite, is an error in words for every command."""

import numpy as np
import pytest
from safetensors.torch import load_file

from fastqt.errors import InputError
from fastqt.sentences.inference.encoder import SentenceEncoder
from fastqt.sentences.inference.index import Index, build_index
from fastqt.sentences.inference.mine import mine
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.runs.tensor_files import save_tensors
from fastqt.sentences.train import train
from tests.shared.command_lines import error_line
from tests.shared.word_vectors import write_vectors

SETTINGS = {"word_dim": 4, "batch_size": 8, "context_size": 1, "steps": 1, "device": "cpu"}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Models with a weight that is NaN, or whose sums overflow, and files that commands read."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "text.txt").write_text("a b\n\nc d\n" * 8)
    (folder / "pairs.tsv").write_text("a b\tc d\nc d\ta b\n")
    (folder / "MR").mkdir()
    (folder / "MR" / "all.tsv").write_text("0\ta b\n1\tc d\n" * 20)
    write_vectors(folder / "vectors.txt", "abcd", np.eye(4, 2))
    np.save(folder / "features.npy", np.eye(24, dtype=np.float32))
    for name, value in (("good", None), ("nan", float("nan")), ("huge", 3e38)):
        train(TrainConfig((str(folder / "text.txt"),), **SETTINGS), folder / name)
        weights = load_file(folder / name / "model.safetensors")
        if value is not None:
            for table in weights.values():
                table[1 if name == "nan" else slice(None)] = value
        save_tensors(folder / name / "model.safetensors", weights)
    return folder


ENCODE = [
    "embed MODEL text.txt --out new.npy",
    "embed MODEL text.txt --out new.npy --raw",
    "neighbors MODEL text.txt --query a~b",
    "index MODEL text.txt --out new.index",
    "mine MODEL pairs.tsv --out new.tsv",
    "analogy MODEL text.txt --a a~b --b b~c --c a~b",
    "evaluate MODEL --data . --tasks MR",
    "retrieve MODEL --features features.npy --captions text.txt --share 0.4",
]
READ = [*ENCODE, "export MODEL --format onnx --out new", "expand MODEL vectors.txt --out new"]


@pytest.mark.parametrize(
    ("line", "model", "message"),
    [(line, "nan", "embedding.weight: want finite numbers, got NaN or infinity") for line in READ]
    + [(line, "huge", "the model's vector of '") for line in ENCODE],
)
def test_each_command_says_so(files, capsys, monkeypatch, line, model, message):
    monkeypatch.chdir(files)
    before = sorted(files.rglob("*"))
    words = [word.replace("MODEL", model).replace("~", " ") for word in line.split(" ")]
    assert message in error_line(capsys, *words)
    assert sorted(files.rglob("*")) == before


def test_vectors_of_other_models_are_checked_too(files, tmp_path):
    index = build_index(SentenceEncoder.load(files / "good"), [str(files / "text.txt")], tmp_path / "x.index")
    bad, good = np.full((1, index.width), np.nan, np.float32), np.ones((1, index.width), np.float32)
    with pytest.raises(InputError, match="queries: want finite vectors, got NaN or infinity"):
        Index(index.path).search_vectors(bad, 1)
    for queries, documents, name in ((bad, good, "queries"), (good, bad, "documents")):
        with pytest.raises(InputError, match=f"{name}: want finite vectors, got NaN or infinity"):
            mine(queries, documents, [[0]])


def test_a_step_that_diverges_takes_no_place_of_a_good_model(files, tmp_path):
    """Its loss was still finite: that of the weights before it."""
    config = TrainConfig((str(files / "text.txt"),), **SETTINGS | {"learning_rate": 1e39})
    with pytest.raises(InputError, match="are not finite after step 1, and were not saved: start again with"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run" / "model.safetensors").exists()
    assert not (tmp_path / "run" / "checkpoint.safetensors").exists()
