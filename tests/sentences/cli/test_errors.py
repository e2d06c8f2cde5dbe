"""What nobody can use, and what would be lost, is answered in one line, with status 2, before the work."""

import io
import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from fastqt.sentences.cli import main
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.train import train
from tests.shared.command_lines import error_line
from tests.shared.word_vectors import write_vectors

TEXT = "a b\n\nc d\n" * 8
SMALL = {"word_dim": 4, "batch_size": 8, "context_size": 1, "steps": 1, "device": "cpu"}
TRAIN = "--word-dim 4 --batch-size 8 --context-size 1 --steps 1 --device cpu"
NOT_UTF8 = "gr\udcfcn"  # how Python reads the bytes of a command line that are not UTF-8


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A directory with runs, files that commands read, and files that are wrong in many ways."""
    folder = tmp_path_factory.mktemp("files")
    texts = {"text.txt": TEXT, "text.npy": TEXT, "text.index": TEXT, "empty": "", "pairs.tsv": "a\tb\nc\td\n"}
    texts |= {"ragged.tsv": "one\ttwo\tthree\nfour\tfive\n", "no pairs.tsv": "\n", "many.txt": "a\n" * 5}
    texts |= {"lines.txt": "a\nb\nc\nd\n", "train.tsv": "a\t0\nb\t1\n", "dev.tsv": "c\t2\n"}
    texts |= {"tokens.json": "{}", "vectors.json": '{"a": [1, 2], "b": [3, 4]}', "long.txt": "x" * (1 << 21)}
    for name, text in texts.items():
        (folder / name).write_text(text)
    for name, more in (("model", {}), ("other", {"seed": 1}), ("gloss", {"model": "gloss-bow"})):
        train(TrainConfig((str(folder / "text.txt"),), **SMALL, **more), folder / name)
    assert main(["index", f"{folder}/model", f"{folder}/text.txt", "--out", f"{folder}/good.index"]) == 0
    for name in ("dir", "dir.npy", "dir.json"):
        (folder / name).mkdir()
    (folder / "loop").symlink_to("loop")
    (folder / "link.tsv").symlink_to("pairs.tsv")
    os.mkfifo(folder / "fifo")
    write_vectors(folder / "vectors.txt", "abcde", np.eye(5, 2))
    write_vectors(folder / "nan.txt", "abcde", np.eye(5, 2) * np.nan)
    np.save(folder / "x.npy", np.eye(4, dtype=np.float32))
    (folder / "good" / "MR").mkdir(parents=True)
    (folder / "good" / "MR" / "all.tsv").write_text("0\ta\n1\tb\n" * 20)
    for name in ("model.safetensors", "metrics.jsonl", "huggingface/huggingface"):
        path = folder / f"with {name.split('/')[0]}" / name
        path.parent.mkdir(parents=True)
        path.write_text("mine")
    return folder


def contents(folder):
    """What each file holds, and which folders there are."""
    return {path: path.read_bytes() if path.is_file() else None for path in Path(folder).rglob("*")}


def with_input(monkeypatch, text):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))


INDEX, MINE = "index model text.txt --out new.index", "mine model pairs.tsv --out new.tsv"
GOOD, RETRIEVE = "--data good", "retrieve model --features x.npy --captions"
# A tilde stands for a blank within an argument.
REFUSED = [
    ("fly", "invalid choice: 'fly'"),
    ("train dir --out new", "dir: want a file, or a folder that Dataset.save_to_disk wrote; state.json is"),
    ("train empty --out new", "the corpus is empty: no sentence in empty"),
    ("train long.txt --out new", "long.txt: line 1 is longer than 1 MiB"),
    ("train loop --out new", "cannot read loop: Too many levels of symbolic links"),
    ("train fifo --out new", "corpus: want files that can be read more than once, got a pipe"),
    ("train text.txt --out model", "already holds a run"),
    ("train text.txt --out text.txt", "cannot write to text.txt: File exists"),
    (f"train text.txt --out new --dev text.txt {TRAIN}", "text.txt: line 1: "),
    ("train --out new", "no CORPUS given"),
    ("train --out new --resume", "no CORPUS given, and no run to resume in new"),
    ("train --out model --resume --batch-size 9", "cannot resume: batch_size is 9, but the run was started"),
    ("train text.txt --out new --clip -1", "clip: want at least 0, got -1.0"),
    ("train ragged.tsv --model simcse --out new", "line 2: want 3 columns as in line 1 of ragged.tsv, got 2"),
    ("train text.txt --out new --teacher x.npy", "teacher: want it with model pairs alone"),
    ("embed model text.txt --out v.csv", "v.csv: want a name that ends in .npy, got .csv"),
    ("embed model text.txt --out dir.npy", "cannot write dir.npy: Is a directory"),
    (f"embed model text.txt --out {'v' * 300}.npy", ".npy: File name too long"),
    ("embed model text.txt --out v.npy --side both", "argument --side: invalid choice: 'both'"),
    ("embed model empty --out v.npy", "nothing to embed: no sentence in empty"),
    ("embed model dir --out v.npy", "cannot read dir: Is a directory"),
    (f"embed model {NOT_UTF8} --out v.npy", "no such file: gr"),
    ("embed absent text.txt --out v.npy", "no trained model: absent is not a directory"),
    ("embed dir text.txt --out v.npy", "no trained model in dir: config.json is missing"),
    ("neighbors model empty --query a", "nothing to search: no sentence in empty"),
    ("neighbors model absent --query a", "no such file: absent"),
    ("neighbors model --query a", "want CORPUS or --index, got none"),
    ("neighbors model text.txt --index good.index --query a", "want CORPUS or --index, got both"),
    ("neighbors model text.txt", "the following arguments are required: --query"),
    ("neighbors model text.txt --query a -k 0", "k: want at least 1, got 0"),
    ("neighbors other --index good.index --query a", "good.index was made by another model"),
    ("analogy model text.txt --a x --b y", "the following arguments are required: --c"),
    ("mine model ragged.tsv --out new.tsv", "line 1: want 2 columns, got 3"),
    ("mine model no~pairs.tsv --out new.tsv", "pairs: want a query and its positive"),
    (f"{MINE} --max-score -2", "no negative found: want weaker margins or scores"),
    (f"{MINE} --corpus dev.tsv", "corpus: want sentences without a tab"),
    ("evaluate model", "the following arguments are required: --data"),
    (f"evaluate model {GOOD} --tasks MR,CR", "tasks: CR needs CR/all.tsv.xz in "),
    (f"evaluate model {GOOD} --json o.csv", "o.csv: want a name that ends in .json, got .csv"),
    (f"evaluate model {GOOD} --json dir.json", "cannot write dir.json: it is a directory"),
    (f"evaluate model {GOOD} --json absent/o.json", "cannot write absent/o.json: absent is not a"),
    (f"evaluate random:model {GOOD} --baseline", "baseline: want a directory that train wrote as MODEL"),
    ("evaluate model --data text.txt", "data: text.txt is not a directory"),
    (f"{RETRIEVE} train.tsv --dev dev.tsv", "test: want both --dev and --test or neither of them"),
    (f"{RETRIEVE} lines.txt --json out.txt", "out.txt: want a name that ends in .json"),
    (f"{RETRIEVE} many.txt", "line 5: want an image from 0 to 3, got 4"),
    ("export gloss --format onnx --out new", "model: want one with an encoder to export, got a Gloss"),
    ("export model --format onnx --out model", "out: want a new directory, or --overwrite"),
    ("export model --format onnx --out text.txt", "out: want a directory, got the file"),
    ("export model --format onnx --out no/where", "cannot write no/where: no is not a direct"),
    ("expand model vectors.txt --out text.txt", "text.txt: File exists"),
    ("expand model nan.txt --out new", "vectors"),
    ("check --quick --device gpu", "--device: want one of cpu"),
    ("check --quick --device cpu meta", "--device: want one that torch can use here, cpu"),
    ("check --quick --device cpu:7", "--device: want a number below 1"),
    ("check --quick --seconds 0", "--seconds: want more than 0, got 0"),
    ("compile info_nce --workers -1", "workers: want at least 1, got -1"),
    ("compile info_nce --option scale", "--option: want NAME=VALUE, got 'scale'"),
    ("compile info_nce --target sm_90", "unset TRITON_INTERPRET"),
]
READ = "is read, and would be lost"
NOT_TWICE = "want standard input, -, once, got it 2 times"
NOT_STDIN = "want files that can be read more than once, got standard input; write the text to"
LOST = [
    ("embed model text.npy --out text.npy", READ),
    ("index model text.txt text.index --out text.index", READ),
    ("mine model pairs.tsv --out link.tsv", READ),
    ("mine model text.txt --corpus pairs.tsv --out link.tsv", READ),
    (f"evaluate model {GOOD} --json model/config.json", READ),
    (f"evaluate random:model {GOOD} --json model/finished.json", READ),
    (f"evaluate sif:pairs.tsv,tokens.json {GOOD} --json tokens.json", READ),
    (f"evaluate word-vectors:vectors.json {GOOD} --json ./vectors.json", READ),
    (f"{RETRIEVE} lines.txt --json model/config.json", READ),
    (f"train - --out new {TRAIN}", f"corpus: {NOT_STDIN}"),
    ("train text.txt --out with~model.safetensors", "already holds a run"),
    ("train text.txt --out with~model.safetensors --resume", "no run to resume, but a file of a run's"),
    ("train text.txt --out with~metrics.jsonl --resume", "no run to resume, but a file of a run's name"),
    ("train text.txt --out with~huggingface", "already holds a run"),
    ("neighbors model - - --query a", f"corpus: {NOT_TWICE}"),
    ("index model - - --out new.index", f"corpus: {NOT_TWICE}"),
    ("analogy model - - --a a --b b --c c", f"corpus: {NOT_TWICE}"),
    ("mine model - --corpus - --out new.tsv", f"pairs and corpus: {NOT_TWICE}"),
    (f"{RETRIEVE} - --dev - --test -", "captions, dev and test: want standard input, -, once, got it 3"),
    ("retrieve model --features - --captions text.txt", f"features: {NOT_STDIN}"),
    (f"train text.txt --out new --valid - {TRAIN}", f"valid: {NOT_STDIN}"),
    (f"train text.txt --out new --dev - {TRAIN}", f"dev: {NOT_STDIN}"),
    (f"train text.txt --out new --valid absent {TRAIN}", "no such file: absent"),
    (f"train text.txt --out new --dev absent {TRAIN}", "no such file: absent"),
]


@pytest.mark.parametrize(("line", "message"), [*REFUSED, *LOST])
def test_one_line_says_what_is_wrong_and_all_files_stay(files, capsys, monkeypatch, line, message):
    monkeypatch.chdir(files)
    with_input(monkeypatch, TEXT)
    before = contents(files)
    assert message in error_line(capsys, *(word.replace("~", " ") for word in line.split(" ")))
    if (line, message) in REFUSED:
        assert not [*files.rglob("*.partial")]
        shutil.rmtree("new", ignore_errors=True)  # which a training may have begun
    assert contents(files) == before


def test_a_missing_damaged_or_other_file_of_a_model_is_named(files, tmp_path, capsys):
    def refused():
        return error_line(capsys, "embed", run, files / "text.txt", "--out", tmp_path / "x.npy")

    run = shutil.copytree(files / "model", tmp_path / "run")
    for name in ("config.json", "vocabulary.json", "model.safetensors"):
        whole = (run / name).read_bytes()
        (run / name).write_bytes(whole[:50])
        assert name in refused()
        (run / name).unlink()
        assert f"{name} is missing" in refused()
        (run / name).write_bytes(whole)
    config = json.loads((run / "config.json").read_text())
    for change, message in (
        ({"format": 99, "fastqt": "9.0"}, "has format 99, written by fastqt 9.0; fastqt 0.1.0 reads format"),
        ({"word_dim": 9}, "model.safetensors does not fit its config.json: the shape of "),
        ({"encoder": "gru"}, "model.safetensors does not fit its config.json: "),
        ({"colour": "red"}, "config.json is not the config.json of a training run"),
    ):
        (run / "config.json").write_text(json.dumps(config | change))
        assert message in refused()


@pytest.mark.parametrize(
    ("line", "missing", "message", "extra"),
    [
        (f"evaluate model {GOOD}", "sklearn.metrics", "evaluate: want sklearn.metrics, got none", "eval"),
        ("export model --format onnx --out new", "onnxscript", "format onnx needs onnxscript", "onnx"),
        (
            "export model --format sentence-transformers --out new",
            "sentence_transformers",
            "format sentence-transformers: want sentence-transformers >= 6, got none",
            "st",
        ),
        (f"{INDEX} --kind ivf", "faiss", "want faiss-cpu >= 1.10, got none", "faiss"),
    ],
)
def test_an_extra_that_is_not_installed_is_named(files, capsys, monkeypatch, line, missing, message, extra):
    monkeypatch.chdir(files)
    for name in [name for name in sys.modules if name.startswith("fastqt.sentences.evaluation")]:
        monkeypatch.delitem(sys.modules, name)  # is imported again
    monkeypatch.delattr("fastqt.sentences.evaluation", raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    assert error_line(capsys, *line.split(" ")).endswith(f"{message}: pip install 'fastqt[{extra}]'")
    assert not Path("new").exists()
    # A flat index needs no library.
    assert main(["neighbors", "model", "--index", "good.index", "--query", "a"]) == 0
