"""Everything that the command line writes as JSON is JSON, which has no NaN and no infinity."""

import ast
import json
import math
from pathlib import Path

import numpy as np
import pytest

import fastqt
from fastqt.sentences.cli import main
from fastqt.sentences.json_text import to_json
from fastqt.sentences.runs.tensor_files import open_tensors
from fastqt.sentences.tools.plot import Run
from fastqt.sentences.train.summary import closing_table
from tests.shared.command_lines import SMALL


def strictly(text):
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in {text[:200]}"))


def test_numbers_that_json_lacks_are_null():
    value = {"a": [math.nan, {"b": (math.inf, -math.inf, 1e308)}], "c": np.float64("nan"), "d": True}
    assert strictly(to_json(value)) == {"a": [None, {"b": [None, None, 1e308]}], "c": None, "d": True}


def test_one_function_writes_all_json():
    """So that no writer forgets it; what goes to a tokenizer is not written."""
    source = Path(fastqt.__file__).parent
    callers = {
        path.relative_to(source).as_posix()
        for path in source.rglob("*.py")
        if "json" in (text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and node.attr in ("dump", "dumps", "JSONEncoder")
    }
    text = "sentences/text"
    assert callers == {
        "sentences/json_text.py",
        *(f"{text}/{each}.py" for each in ("expansion", "subwords", "vocabulary")),
    }


@pytest.mark.slow
def test_what_commands_write_is_json(planted, reviews, tmp_path, capsys):
    """Of a training that finds no correlation, and an evaluation with figures that are not defined."""
    dev, run = tmp_path / "dev.tsv", tmp_path / "run"
    dev.write_text("".join(f"g\t{n}\tplace1\tplace1\n" for n in range(4)))
    train = ("train", planted[0], "--out", str(run), *SMALL, "--keep-checkpoint")
    assert main([*train, "--valid", planted[1], "--dev", str(dev), "--valid-every", "3"]) == 0
    lines = [strictly(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["dev_spearman"] for line in lines if "dev_spearman" in line] == [None] * len(lines)
    assert "dev_alignment" not in lines[-1]
    with open_tensors(run / "checkpoint.safetensors") as file:
        assert strictly(file.metadata()["progress"])["best"] is None
    assert main([*train[:4], "--resume"]) == 0

    Path(reviews, "STS", "STS12.tsv").write_text("one\t1\tplace1\tplace2\n" * 3)
    results = ("--data", reviews, "--json", str(run / "evaluation.json"), "--baseline")
    assert main(["evaluate", str(run), *results]) == 0
    assert "STS12: not defined. All gold scores are 1, and a constant has no" in capsys.readouterr().out
    features = tmp_path / "features.npy"
    np.save(features, np.random.default_rng(0).normal(size=(600, 3)))
    shown = ("--features", str(features), "--captions", planted[0], "--epochs", "1")
    assert main(["retrieve", str(run), *shown, "--json", str(tmp_path / "retrieval.json")]) == 0
    assert main(["export", str(run), "--format", "safetensors", "--out", str(tmp_path / "export")]) == 0
    assert main([*train[:3], str(tmp_path / "last"), *SMALL]) == 0  # without a checkpoint

    files = [path for path in tmp_path.rglob("*.json") if path.is_file()]
    assert {"config.json", "finished.json", "evaluation.json", "retrieval.json"} <= {
        path.name for path in files
    }
    for path in files:
        strictly(path.read_text())
    assert strictly((run / "evaluation.json").read_text())["tasks"]["STS12"]["pearson"] is None

    # Figures that are null are read as none.
    assert "–" in next(line for line in closing_table(run).splitlines() if "spearman" in line)
    assert np.isnan(Run.load(run).series("dev_spearman")[1]).all()
    assert (
        "spearman" not in (run / "README.md").read_text().lower().split("## versions")[0].split("| figure")[1]
    )
