"""The examples of the gallery run, each on a small text of its own."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def example(monkeypatch):
    """Loads an example as the script that it is."""
    monkeypatch.syspath_prepend(EXAMPLES)

    def load(name):
        specification = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
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


@pytest.mark.slow
def test_each_corpus_has_its_nearest_sentences(example, texts):
    query = "The dogs of house 12 sleep near door 5 ."
    corpora = [word for text in texts for word in ("--corpus", text)]
    lines = example("nearest_sentences").main([*corpora, "--query", query, "--epochs", "2", "-k", "3"])
    assert lines[0] == query
    assert [line.split()[0] for line in lines[1:]] == ["cats"] * 3 + ["dogs"] * 3
    assert lines[4] == f"  {'dogs':8} 1.000  {query}"


@pytest.mark.slow
def test_both_models_have_a_path(example, texts, tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "paths.svg"
    paths = example("alignment_and_uniformity").main(
        ["--corpus", texts[0], "--steps", "4", "--out", str(out)]
    )
    assert {name: len(path) for name, path in paths.items()} == {"simcse": 4, "mixcse": 4}
    assert all(alignment > 0 > uniformity for path in paths.values() for uniformity, alignment in path)
    assert "<svg" in out.read_text()


@pytest.mark.slow
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


@pytest.mark.slow
def test_an_index_finds_what_comparing_with_all_does(example, texts, tmp_path):
    pytest.importorskip("faiss")
    from fastqt.sentences.runs.config import TrainConfig
    from fastqt.sentences.train import train

    train(TrainConfig((texts[0],), batch_size=100, steps=2), tmp_path / "run")
    query = "The cats of house 12 sleep near door 5 ."
    lines = example("search_a_million").main([str(tmp_path / "run"), texts[0], "--query", query, "-k", "2"])
    assert lines[0].startswith("300 sentences")
    assert lines[4:6] == [query, f"  1.000  {query}"]
    assert not any("missed" in line for line in lines)
