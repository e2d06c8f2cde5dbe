"""fastqt plot: the drawing shows the numbers in the files of the runs."""

import json

import pytest

from fastqt.sentences.cli import main
from fastqt.sentences.runs.config import TrainConfig
from tests.shared.command_lines import error_line

figure = pytest.importorskip("matplotlib.figure", reason="the extra plot is not installed")


def write_run(directory, *lines):
    directory.mkdir()
    (directory / "config.json").write_text(TrainConfig(("corpus.txt",)).to_json())
    (directory / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    return str(directory)


@pytest.fixture
def runs(tmp_path):
    figures = {"forward_accuracy": 0.3, "chance": 0.01, "validation_loss": 4.5}
    quick = [{"step": step, "loss": 5 - step / 100, "seconds": 36.0 * step} for step in (100, 200)]
    quick[1] |= figures
    mixed = [{"step": step, "alignment": 0.2 / step, "seconds": 1.0} for step in range(1, 60)]
    return write_run(tmp_path / "quick", *quick), write_run(tmp_path / "mixed", *mixed)


@pytest.fixture
def drawn(monkeypatch):
    """What is saved: by the labels of its axes, the curves of each panel by their labels, and their marks."""
    panels, save = {}, figure.Figure.savefig

    def look(drawing, path, **options):
        for axes in drawing.axes:
            panels[axes.get_xlabel(), axes.get_ylabel()] = {
                curve.get_label(): ([list(map(float, x)) for x in curve.get_data()], curve.get_marker())
                for curve in axes.get_lines()
            }
        save(drawing, path, **options)

    monkeypatch.setattr(figure.Figure, "savefig", look)
    return panels


def test_curves_show_the_reported_metrics(runs, tmp_path, drawn, capsys):
    """One panel a figure, and shares in per cent; marks where points are few."""
    out = tmp_path / "out"
    assert main(["plot", *runs, "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out / 'training.svg'}\n"
    assert (out / "training.svg").read_text().lstrip().startswith("<?xml")
    assert drawn["step", "loss"] == {
        "quick": ([[100, 200], [4, 3]], "o"),
        "quick, held out": ([[200], [4.5]], "o"),
    }
    assert drawn["step", "forward accuracy, %"] == {
        "quick": ([[200], [30]], "o"),
        "quick, chance": ([[200], [1]], "o"),
    }
    (points, mark) = drawn["step", "alignment"]["mixed"]
    assert (points[1][3], len(points[0]), mark) == (0.05, 59, "")
    drawn.clear()
    assert main(["plot", runs[0], "--over", "seconds"]) == 0
    assert drawn["hours", "loss"]["quick"][0] == [[1, 2], [4, 3]]


def test_what_is_no_run_and_a_drawing_of_somebody_else_are_refused(runs, tmp_path, capsys):
    message = f"no trained model in {tmp_path}/empty: config.json is missing"
    assert error_line(capsys, "plot", runs[0], tmp_path / "empty") == message
    other = tmp_path / "quick" / "training.svg"
    other.write_text("<svg>mine</svg>")
    assert "fastqt plot has not drawn what is there" in error_line(capsys, "plot", *runs)
    assert other.read_text() == "<svg>mine</svg>"
    (tmp_path / "mixed" / "metrics.jsonl").unlink()
    assert "nothing to draw: " in error_line(capsys, "plot", runs[1])


def test_damaged_lines_are_left_out(runs, tmp_path, drawn, capsys):
    bad = ["5", "null", '{"step": "x", "loss": 1}', "{", '{"step": 9' + "9" * 400 + "}", "\xff", ""]
    path = tmp_path / "quick" / "metrics.jsonl"
    path.write_text("\n".join(bad) + "\n" + path.read_text(), encoding="latin-1")
    assert main(["plot", runs[0]]) == 0
    assert drawn["step", "loss"]["quick"][0] == [[100, 200], [4, 3]]
    assert "metrics.jsonl is damaged in 5 of its lines, first in line 1: left out" in capsys.readouterr().err
