"""The figures show the numbers in the files of the runs."""

import json

import pytest
from matplotlib.figure import Figure

from fastqt.errors import InputError
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.tools.plot import draw_figures


def line(step, **figures):
    return {"step": step, "loss": 5 - step / 100, "seconds": 36.0 * step, **figures}


def write_run(directory, lines, tasks=None, width=0, **settings):
    directory.mkdir()
    (directory / "config.json").write_text(TrainConfig(("corpus.txt",), **settings).to_json())
    (directory / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    if tasks is not None:
        (directory / "evaluation.json").write_text(json.dumps({"tasks": tasks, "width": width}))
    return directory


@pytest.fixture
def quick(tmp_path):
    figures = {"forward_accuracy": 0.3, "backward_accuracy": 0.2, "chance": 0.01, "validation_loss": 4.5}
    figures |= {"validation_forward_accuracy": 0.05, "validation_backward_accuracy": 0.1}
    lines = [line(100, forward_accuracy=0.1, backward_accuracy=0.2, chance=0.01), line(200, **figures)]
    tasks = {"MR": {"accuracy": 0.8}, "TREC": {"accuracy": 0.6}, "STSB": {"pearson": 0.1}}
    return write_run(tmp_path / "quick", lines, tasks, width=120)


@pytest.fixture
def mixed(tmp_path):
    cosines = {"positive_cosine": 0.9, "negative_cosine": 0.1, "mixed_cosine": 0.4}
    lines = [line(step, alignment=0.2 / step, uniformity=-step / 10, **cosines) for step in (1, 2, 3)]
    options = {"model": "mixcse", "encoder": "gru", "hidden_size": 50}
    return write_run(tmp_path / "mixed", lines, tasks={"MR": {"accuracy": 0.6}}, width=50, **options)


@pytest.fixture
def drawn(monkeypatch):
    """Records the panels of each saved figure: by axis labels, the curves by their labels."""
    found = {}
    save = Figure.savefig

    def look(figure, path, **options):
        found[path.name.split(".")[0]] = {
            (axes.get_xlabel(), axes.get_ylabel()): {
                curve.get_label(): [list(map(float, values)) for values in curve.get_data()]
                for curve in axes.get_lines()
            }
            for axes in figure.axes
        }
        found["marks"] = {curve.get_label(): curve.get_marker() for curve in figure.axes[0].get_lines()}
        save(figure, path, **options)

    monkeypatch.setattr(Figure, "savefig", look)
    return found


def test_curves_show_the_reported_metrics(quick, mixed, tmp_path, drawn):
    paths = draw_figures([quick, mixed], tmp_path / "figures")
    assert [path.name for path in paths] == ["training.svg", "efficiency.svg", "sizes.svg", "views.svg"]
    assert all(path.read_text().lstrip().startswith("<?xml") for path in paths)
    training = drawn["training"]
    assert training["step", "loss"] == {
        "quick": [[100, 200], [4, 3]],
        "quick, held out": [[200], [4.5]],
        "mixed": [[1, 2, 3], [4.99, 4.98, 4.97]],
    }
    # One panel a quantity, and shares in per cent as in the documents.
    assert training["step", "forward accuracy, %"] == {
        "quick": [[100, 200], [10, 30]],
        "quick, held out": [[200], [5]],
        "quick, chance": [[100, 200], [1, 1]],
    }
    assert training["step", "backward accuracy, %"]["quick, held out"] == [[200], [10]]
    assert training["step", "cosine of mixed negatives"] == {"mixed": [[1, 2, 3], [0.4] * 3]}
    assert training["step", "cosine of positives"] == {"mixed": [[1, 2, 3], [0.9] * 3]}
    efficiency = drawn["efficiency"]
    assert efficiency["hours of training", "held-out forward accuracy, %"] == {"quick": [[2], [5]]}
    assert efficiency["hours of training", "held-out backward accuracy, %"] == {"quick": [[2], [10]]}
    assert efficiency["hours of training", "mean accuracy, %"] == {
        "quick": [[2], [pytest.approx(70)]],
        "mixed": [[0.03], [60]],
    }
    assert drawn["sizes"]["width of a sentence's vector", "mean accuracy, %"] == {
        "quick": [[120], [pytest.approx(70)]],
        "mixed": [[50], [60]],
    }
    assert drawn["views"]["alignment", "uniformity"]["mixed"] == [[0.2 / 3], [-0.3]]


def test_points_are_marked_where_they_are_few(tmp_path, drawn):
    """Without marks, a metric that was reported once would not be seen. Panels without data are not drawn."""
    few = write_run(tmp_path / "few", [{"step": 0, "validation_loss": 9.0, "seconds": 0}, line(100)])
    many = write_run(tmp_path / "many", [line(step) for step in range(1, 100)])
    assert [path.stem for path in draw_figures([few, many], tmp_path)] == ["training"]
    assert drawn["marks"] == {"few": "o", "few, held out": "o", "many": ""}
    assert list(drawn["training"]) == [("step", "loss")]


def test_a_directory_without_a_run_is_named(tmp_path, quick):
    with pytest.raises(InputError, match=r"no trained model in .*empty: config.json is missing"):
        draw_figures([quick, tmp_path / "empty"], tmp_path)
    bad = ("[]", "{", "{}", '{"tasks": [], "width": 1}', '{"tasks": {"MR": {"accuracy": "x"}}}', "\xff")
    for text in bad:
        (quick / "evaluation.json").write_text(text, encoding="latin-1")
        with pytest.raises(InputError, match=r"evaluation.json is not what `fastqt evaluate --json` writes"):
            draw_figures([quick], tmp_path)
    for text in ("", "5\n", None):
        (quick / "metrics.jsonl").unlink() if text is None else (quick / "metrics.jsonl").write_text(text)
        with pytest.raises(InputError, match=r"nothing to draw: .*metrics.jsonl has no line yet"):
            draw_figures([quick], tmp_path)


def test_damaged_lines_are_left_out(quick, mixed, tmp_path, drawn, capsys):
    bad = ["5", "null", '{"step": "x", "loss": 1}', "{", '{"step": 9' + "9" * 400 + "}", "\xff", "[[[[", ""]
    bad.insert(0, '{"step": 2, "loss": "x", "alignment": 1' + "0" * 400 + ', "forward_accuracy": null}')
    for run in (quick, mixed):
        lines = (run / "metrics.jsonl").read_text().splitlines()
        text = "\n".join([*bad[:4], lines[0], *bad[4:], *lines[1:], '{"step": 1, "uniformity": -1}']) + "\n"
        (run / "metrics.jsonl").write_text(text, encoding="latin-1")
    draw_figures([quick, mixed], tmp_path / "figures")
    assert drawn["training"]["step", "loss"]["quick"] == [[100, 200], [4, 3]]
    assert drawn["views"]["alignment", "uniformity"]["mixed"] == [[0.2 / 3], [-0.3]]
    for warning in capsys.readouterr().err.splitlines():
        assert warning.endswith("metrics.jsonl is damaged in 6 of its lines, first in line 2: left out")


def test_a_drawing_of_somebody_else_stays(quick, tmp_path):
    other = tmp_path / "efficiency.svg"
    other.write_text("<svg>mine</svg>")
    with pytest.raises(InputError, match=r"efficiency.svg: fastqt plot has not drawn what is there"):
        draw_figures([quick], tmp_path)
    assert other.read_text() == "<svg>mine</svg>"
    assert not (tmp_path / "training.svg").exists()
    other.unlink()
    assert draw_figures([quick], tmp_path) == draw_figures([quick], tmp_path)
