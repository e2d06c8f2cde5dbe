"""A command reads each file of a run once, and so does a training that is resumed."""

import sys
from collections import Counter
from pathlib import Path

import pytest

from fastqt.sentences.cli import main
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.train import train

opened: list[str] | None = None


def note(event, arguments):
    if opened is not None and event == "open":
        opened.append(str(arguments[0]))


sys.addaudithook(note)  # it stays until the process ends

COMMANDS = {
    "embed": "embed run c.txt --out v.npy",
    "neighbors": "neighbors run c.txt --query place0",
    "mine": "mine run p.tsv --negatives 1 --out n.tsv",
    "index": "index run c.txt --out c.index",
    "evaluate": "evaluate run --data eval --json run/evaluation.json --baseline",
    "export": "export run --format sentence-transformers --out out",
    "expand": "expand run w.txt --out more",
    "resume": "train --out run --resume --steps 2",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_file_of_a_run_is_parsed_and_verified_once(name, planted, tmp_path, monkeypatch, capsys):
    global opened
    if name == "export":
        pytest.importorskip("sentence_transformers")
    monkeypatch.chdir(tmp_path)
    train(
        TrainConfig((planted[0],), word_dim=8, batch_size=40, context_size=1, steps=1, keep_checkpoint=True),
        "run",
    )
    Path("w.txt").write_text("place0 1\nplace1 2\nplace2 4\nnew 3\n")
    Path("c.txt").write_text("place0 topic1word1\nplace1 topic1word2\n")
    Path("p.tsv").write_text("place0\tplace1\ntopic1word1\ttopic1word2\n" * 4)
    Path("eval/MR").mkdir(parents=True)
    Path("eval/MR/all.tsv").write_text("".join(f"{n % 2}\tplace{n % 2} topic1word{n}\n" for n in range(40)))
    opened = []
    try:
        assert main(COMMANDS[name].split()) == 0, capsys.readouterr().err
    finally:
        paths, opened = opened, None
    times = Counter(Path(path).resolve() for path in paths)
    weights = "checkpoint.safetensors" if name == "resume" else "model.safetensors"
    for file in ("config.json", "vocabulary.json", weights):
        assert times[tmp_path / "run" / file] == 1, file
