"""The examples run: those of several processes do what one does with the whole batch, and the gallery's."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.train import train

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "examples"
RUNNER = str(ROOT / "tests/shared/run_example.py")
# Of each: options of both runs, of that of one process alone, and the part of the first loss that is left.
EXAMPLES = {
    "clip_two_encoders": (["--steps", "12"], [], 0.6),
    "ddp_simcse": (["--steps", "10", "--dropout", "0"], [], 0.3),
    # It begins at what guessing gives.
    "fsdp2_quickthoughts": (["--steps", "60", "--dropout", "0"], [], 0.92),
    # Lightning's batch size is that of a rank.
    "lightning_simcse": (["--steps", "10", "--dropout", "0"], ["--batch-size", "128"], 0.3),
}
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def run(directory: Path, example: str, processes: int, *options: str) -> list[dict]:
    """What each rank of an example's run has at the end; one process runs without torchrun."""
    directory.mkdir()
    launcher = [] if processes == 1 else [*TORCHRUN, str(processes)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(
        [sys.executable, *launcher, RUNNER, example, str(directory), *options],
        env=environment,
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(processes)]


@pytest.mark.parametrize("example", EXAMPLES)
def test_two_processes_train_as_one_does(example, tmp_path):
    if example.startswith("lightning") and importlib.util.find_spec("lightning") is None:
        pytest.skip("lightning is not installed, which the example is for")
    options, of_one, least = EXAMPLES[example]
    first, second = run(tmp_path / "two", example, 2, *options)
    assert first == second  # the losses, and all bits of the parameters
    losses = first["losses"]
    assert sum(losses[-3:]) / 3 < least * losses[0]
    (alone,) = run(tmp_path / "one", example, 1, *options, *of_one)
    assert losses[0] == pytest.approx(alone["losses"][0], rel=1e-6)
    # The first step's gradients were the same too.
    assert losses[1] == pytest.approx(alone["losses"][1], rel=1e-3)


def test_chunks_and_a_text_of_ones_own(tmp_path):
    text = tmp_path / "text"
    text.write_text("\n".join(f"Sentence {i} is about {i * i} things." for i in range(200)))
    options = ["--data", str(text), "--steps", "3", "--batch-size", "48", "--dropout", "0"]
    whole = run(tmp_path / "whole", "ddp_simcse", 2, *options)
    chunks = run(tmp_path / "chunks", "ddp_simcse", 2, *options, "--chunk-size", "7")
    assert chunks[0] == chunks[1]
    assert chunks[0]["losses"] == pytest.approx(whole[0]["losses"], rel=1e-4)


@pytest.fixture
def example(monkeypatch):
    """Loads an example as the script that it is."""
    monkeypatch.syspath_prepend(SCRIPTS)

    def load(name):
        specification = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
        module = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(module)
        return module

    yield load
    sys.modules.pop("toy_data", None)


@pytest.fixture
def texts(tmp_path):
    """Two texts of 300 sentences; those of the first are of cats, those of the second of dogs."""
    for name in ("cats", "dogs"):
        lines = (f"The {name} of house {i} sleep near door {i % 7} ." for i in range(300))
        (tmp_path / f"{name}.txt").write_text("\n".join(lines))
    return [str(tmp_path / "cats.txt"), str(tmp_path / "dogs.txt")]


def test_each_corpus_has_its_nearest_sentences(example, texts):
    query = "The dogs of house 12 sleep near door 5 ."
    corpora = [word for text in texts for word in ("--corpus", text)]
    lines = example("nearest_sentences").main([*corpora, "--query", query, "--epochs", "2", "-k", "3"])
    assert lines[0] == query
    assert [line.split()[0] for line in lines[1:]] == ["cats"] * 3 + ["dogs"] * 3
    assert lines[4] == f"  {'dogs':8} 1.000  {query}"


def test_both_models_have_a_path(example, texts, tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "paths.svg"
    options = ["--corpus", texts[0], "--steps", "4", "--out", str(out)]
    paths = example("alignment_and_uniformity").main(options)
    assert {name: len(path) for name, path in paths.items()} == {"simcse": 4, "mixcse": 4}
    assert all(alignment > 0 > uniformity for path in paths.values() for uniformity, alignment in path)
    assert "<svg" in out.read_text()


def test_unseen_pictures_find_their_captions(example, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    out = tmp_path / "pictures.svg"
    try:
        example("clip_two_encoders").main(["--steps", "20", "--out", str(out)])
    finally:
        torch.distributed.destroy_process_group()
    said = capsys.readouterr().out.splitlines()[-1]
    first, five = map(int, re.search(r"of 256 unseen pictures, (\d+) .* (\d+) among five", said).groups())
    assert 20 < first <= five  # by chance it would be one
    assert "<svg" in out.read_text()


def test_an_index_finds_what_comparing_with_all_does(example, texts, tmp_path):
    pytest.importorskip("faiss")
    train(TrainConfig((texts[0],), batch_size=100, steps=2), tmp_path / "run")
    query = "The cats of house 12 sleep near door 5 ."
    lines = example("search_a_million").main([str(tmp_path / "run"), texts[0], "--query", query, "-k", "2"])
    assert lines[0].startswith("300 sentences")
    assert lines[4:6] == [query, f"  1.000  {query}"]
    assert not any("missed" in line for line in lines)
