"""fastqt export: what it prints, the card that it writes, and what it refuses."""

import json
import sys

import pytest

from fastqt.sentences.cli import main
from tests.shared.command_lines import error_line


def test_safetensors_with_the_figures_of_an_evaluation(model, reviews, tmp_path, capsys):
    pytest.importorskip("sklearn", reason="the extra eval is not installed")
    results = f"{model}/evaluation.json"
    assert main(["evaluate", model, "--data", reviews, "--json", results]) == 0
    accuracy = json.loads((tmp_path / "model/evaluation.json").read_text())["tasks"]["MR"]["accuracy"]
    assert f"| MR accuracy | {accuracy:.4f} |" in (tmp_path / "model/README.md").read_text()
    capsys.readouterr()
    out = tmp_path / "out"
    words = ["export", model, "--format", "safetensors", "--out", str(out)]
    assert main(words) == 0
    assert capsys.readouterr().out == f"{out}: safetensors, vectors of width 16\n"
    card = (out / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: safetensors\n")
    assert f"| MR accuracy | {accuracy:.4f} |" in card
    assert main([*words, "--raw", "--overwrite"]) == 0


def test_errors(model, planted, tmp_path, capsys, monkeypatch):
    gloss = ["--word-dim", "8", "--batch-size", "40", "--steps", "2"]
    assert main(["train", planted[0], "--model", "gloss-bow", "--out", str(tmp_path / "gloss"), *gloss]) == 0
    out = tmp_path / "out"
    for words, message in (
        ([model, "--format", "h5"], "argument --format: invalid choice: 'h5'"),
        ([model], "the following arguments are required: --format"),
        ([tmp_path, "--format", "onnx"], "config.json is missing"),
        ([tmp_path / "gloss", "--format", "onnx"], "model: want one with an encoder to export, got a Gloss"),
        (["absent", "--format", "onnx"], "no trained model: absent is not a directory"),
        ([model, "--format", "safetensors", "--out", model], "out: want a new directory, or --overwrite"),
        ([model, "--format", "safetensors", "--out", planted[0]], "out: want a directory, got the file"),
        (
            [model, "--format", "safetensors", "--out", "no/where"],
            "cannot write no/where: no is not a direct",
        ),
        ([model, "--format", "safetensors", "--out", ""], "want a path, got an empty text"),
    ):
        capsys.readouterr()
        given = [] if "--out" in words else ["--out", out]
        assert message in error_line(capsys, "export", *words, *given), words
    assert not out.exists()

    for format, missing, wanted in (
        ("onnx", "onnxscript", " needs onnxscript: pip install 'fastqt[onnx]'"),
        (
            "sentence-transformers",
            "sentence_transformers",
            ": want sentence-transformers >= 6, got none: pip install 'fastqt[st]'",
        ),
    ):
        with monkeypatch.context() as context:
            context.setitem(sys.modules, missing, None)  # as if it were not installed
            line = error_line(capsys, "export", model, "--format", format, "--out", out)
            assert line == f"format {format}{wanted}"
        assert not out.exists()
    assert not list(tmp_path.glob("*.partial"))
