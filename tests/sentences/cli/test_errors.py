"""Command lines with files and values that nobody can use: each is answered in one line, with status 2."""

import os
import stat
import threading

import numpy as np
import pytest

from fastqt.sentences.cli import main
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.train import train
from tests.shared.command_lines import error_line

SMALL = {"word_dim": 4, "batch_size": 8, "context_size": 1, "steps": 1, "device": "cpu"}
SMALL_WORDS = "--word-dim 4 --batch-size 8 --context-size 1"
NOT_UTF8 = "gr\udcfcn"  # how Python reads the bytes of a command line that are not UTF-8


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A directory with two models and files that are wrong in many ways."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "text.txt").write_text("a b\n\nc d\n" * 8)
    train(TrainConfig((str(folder / "text.txt"),), **SMALL), folder / "model")
    train(TrainConfig((str(folder / "text.txt"),), model="gloss-bow", **SMALL), folder / "gloss")
    (folder / "empty").touch()
    (folder / "latin.txt").write_bytes(b"one\ngr\xfcn\n")
    (folder / "long.txt").write_bytes(b"x" * (1 << 21))
    (folder / "damaged.gz").write_bytes(b"\x1f\x8b\x08junk")
    (folder / "dir").mkdir()
    (folder / "dir.npy").mkdir()
    (folder / "dir.json").mkdir()
    (folder / "loop").symlink_to("loop")
    os.mkfifo(folder / "fifo")
    words, vectors = np.array(["a", "b", "c", "d", "e"]), np.eye(5, 2, dtype=np.float32)
    np.savez(folder / "vectors.npz", words=words, vectors=vectors)
    np.savez(folder / "nan.npz", words=words, vectors=vectors * np.nan)
    for name, lines in (("one", ["0\tx"] * 20), ("few", ["0\ta", "1\tb"]), ("good", ["0\ta", "1\tb"] * 20)):
        (folder / name / "MR").mkdir(parents=True)
        (folder / name / "MR" / "all.tsv").write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "train dir --out new",
            "dir: want a file, or a folder that Dataset.save_to_disk wrote; state.json is",
        ),
        ("train empty --out new", "the corpus is empty: no sentence in empty"),
        ("train latin.txt --out new", "latin.txt: line 2 is not UTF-8 (byte 0xfc"),
        ("train long.txt --out new", "long.txt: line 1 is longer than 1 MiB"),
        ("train damaged.gz --out new", "damaged.gz: damaged or not what its name says"),
        ("train loop --out new", "cannot read loop: Too many levels of symbolic links"),
        ("train fifo --out new", "corpus: want files that can be read more than once, got a pipe"),
        ("train text.txt --out text.txt", "cannot write to text.txt: File exists"),
        ("train text.txt --out text.txt/new", "cannot write to text.txt/new: Not a directory"),
        (f"train text.txt --out loop {SMALL_WORDS}", "cannot write to loop: File exists"),
        (f"train text.txt --out new --valid absent {SMALL_WORDS}", "no such file: absent"),
        (f"train text.txt --out new --dev text.txt {SMALL_WORDS}", "text.txt: line 1: "),
        (f"train text.txt --out new --seed {2**70} {SMALL_WORDS}", "--seed: want a whole number of at most"),
        ("embed model text.txt --out v.csv", "v.csv: want a name that ends in .npy, got .csv"),
        ("embed model text.txt --out dir", "cannot write dir: Is a directory"),
        ("embed model text.txt --out dir.npy", "cannot write dir.npy: Is a directory"),
        ("embed model text.txt --out absent/v.npy", "cannot write absent/v.npy: No such file or directory"),
        ("embed model text.txt --out text.txt/v.npy", "cannot write text.txt/v.npy: Not a directory"),
        (f"embed model text.txt --out {'v' * 300}.npy", ".npy: File name too long"),
        ("embed model empty --out v.npy", "nothing to embed: no sentence in empty"),
        ("embed model dir --out v.npy", "cannot read dir: Is a directory"),
        (f"embed model {NOT_UTF8} --out v.npy", "no such file: gr"),
        ("embed dir text.txt --out v.npy", "no trained model in dir: config.json is missing"),
        ("embed text.txt text.txt --out v.npy", "no trained model: text.txt is not a directory"),
        ("neighbors model empty --query a", "nothing to search: no sentence in empty"),
        ("neighbors model absent --query a", "no such file: absent"),
        (f"neighbors model text.txt --query {NOT_UTF8}", "query: want text in UTF-8, got 'gr\\udcfcn'"),
        ("evaluate model --data good --json o.csv", "o.csv: want a name that ends in .json, got .csv"),
        ("evaluate model --data good --json dir.json", "cannot write dir.json: it is a directory"),
        ("evaluate model --data good --json absent/o.json", "cannot write absent/o.json: absent is not a"),
        ("evaluate model --data good --seed -1", "seed: want 0 to 4294967295, got -1"),
        (f"evaluate random:model --data good --seed {2**40}", "seed: want 0 to 4294967295, got "),
        ("evaluate model --data one", "MR: labels: want at least two classes to train on, got 1"),
        ("evaluate model --data few", "MR: labels: want at least 10 examples of a class"),
        ("evaluate model --data text.txt", "data: text.txt is not a directory"),
        ("evaluate word-vectors:fifo --data good", "model: want files that can be read more than once"),
        ("evaluate sif:a,b,c --data good", "model: want sif:FILE or sif:FILE,COUNTS, got sif:a,b,c"),
        ("plot dir", "config.json is missing"),
        ("plot model --out text.txt", "text.txt: File exists"),
        ("expand model vectors.npz --out text.txt", "text.txt: File exists"),
        ("expand model nan.npz --out new", "vectors"),
        ("expand gloss vectors.npz --out new", "gloss: want a model with word vectors of its own"),
        ("interpolate model --from a --to b", "model: want one trained with --model gloss-bow or gloss-pos"),
        (f"interpolate gloss --from {NOT_UTF8} --to b", "from: want text in UTF-8, got "),
        (f"interpolate gloss --from a --to b --steps {10**9}", "steps: want 0 to 1000, got 1000000000"),
    ],
)
def test_one_line_says_what_is_wrong(files, capsys, monkeypatch, line, message):
    monkeypatch.chdir(files)
    before = sorted(os.listdir())
    assert message in error_line(capsys, *line.split(" "))
    assert set(os.listdir()) <= {*before, "new"}
    assert not [name for *_, names in os.walk(".") for name in names if name.endswith(".partial")]


@pytest.mark.parametrize(
    "line", ["evaluate model --data good --tasks MR --json OUT", "embed model text.txt --out OUT"]
)
def test_links_and_fifos_stay_what_they_are(files, tmp_path, capsys, monkeypatch, line):
    monkeypatch.chdir(files)
    target, link, fifo = tmp_path / "target", tmp_path / "link.npy", tmp_path / "fifo"
    if "--json" in line:
        link = link.with_suffix(".json")
    link.symlink_to(target)
    os.mkfifo(fifo)
    received = []
    reader = threading.Thread(target=lambda: received.append(fifo.read_bytes()), daemon=True)
    reader.start()
    for out in (link, fifo):
        assert main([str(out) if word == "OUT" else word for word in line.split(" ")]) == 0
    reader.join(timeout=60)
    assert link.is_symlink()
    assert stat.S_ISREG(os.lstat(target).st_mode)
    assert fifo.is_fifo()
    assert len(received[0]) > 100
    if "--json" not in line:
        assert received == [target.read_bytes()]
