"""fastqt evaluate and export: tables and files of figures, a baseline, progress; all written JSON is JSON."""

import io
import json
import math
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from fastqt.sentences.cli import main
from fastqt.sentences.evaluation import alive
from fastqt.sentences.evaluation.table import table_lines
from fastqt.sentences.json_text import to_json
from fastqt.sentences.runs.tensor_files import open_tensors
from fastqt.sentences.train.summary import closing_table
from tests.shared.command_lines import SMALL, error_line


def evaluated(capsys, *arguments):
    """The rows that the command prints and the lines of its progress."""
    assert main(["evaluate", *map(str, arguments)]) == 0
    out, err = capsys.readouterr()
    return [line.split() for line in out.splitlines()], err.splitlines()


def test_the_baseline_stands_beside_the_model(model, reviews, tmp_path, capsys):
    """Its figures are those of an evaluation of its own."""
    both, own, alone = (tmp_path / f"{name}.json" for name in ("both", "own", "alone"))
    options = ("--data", reviews, "--seed", 3, "--json")
    rows, told = evaluated(capsys, model, "--baseline", *options, both)
    assert told[3] == "the same with random weights"
    assert len(told) == 7
    ours, _ = evaluated(capsys, model, *options, own)
    theirs, _ = evaluated(capsys, f"random:{model}", *options, alone)
    assert rows[0] == ["task", "figure", "model", "random", "difference"]
    assert [row[:-1] for row in rows[1:]] == [
        [*one, other[-1]] for one, other in zip(ours, theirs, strict=True)
    ]
    assert [row[:2] for row in ours] == [["MR", "accuracy"], ["STS12", "pearson"], ["STS12", "spearman"]]
    assert any(row[2] != row[3] for row in rows[1:])
    for *_, one, other, difference in rows[1:]:
        assert one[-1] == other[-1] == "%"
        assert float(difference) == pytest.approx(float(one[:-1]) - float(other[:-1]), abs=0.011)

    stored, model_alone, random_alone = (json.loads(path.read_text()) for path in (both, own, alone))
    assert stored["baseline"]["model"] == f"random:{model}"
    for name in ("tasks", "identity", "settings", "width"):
        assert stored[name] == model_alone[name]
        assert stored["baseline"][name] == random_alone[name]
    assert "baseline" not in model_alone
    assert model_alone["tasks"]["MR"]["accuracy"] > 0.9
    assert (model_alone["settings"]["seed"], max(model_alone["settings"]["grid"])) == (3, 256)
    evaluated(capsys, model, *options, own, "--tasks", "MR", "--grid", "senteval")
    stored = json.loads(own.read_text())
    assert (list(stored["tasks"]), max(stored["settings"]["grid"])) == (["MR"], 8)


def test_another_encoder_is_the_baseline(model, reviews, tmp_path, capsys):
    """A folder of word vectors as well as a run; one that is not there is refused before any work."""
    (tmp_path / "words.txt").write_text("place1 1 0\nplace2 0 1\nplace3 1 1\n")
    other, out = f"word-vectors:{tmp_path}/words.txt", tmp_path / "out.json"
    rows, told = evaluated(capsys, model, "--baseline", other, "--data", reviews, "--json", out)
    assert rows[0] == ["task", "figure", "model", "words.txt", "difference"]
    theirs, _ = evaluated(capsys, other, "--data", reviews)
    assert [row[3] for row in rows[1:4]] == [row[-1] for row in theirs[:3]]  # what follows is remarks
    assert rows[1][3] != rows[1][2]
    assert other in told
    assert json.loads(out.read_text())["baseline"]["model"] == other
    message = error_line(capsys, "evaluate", model, "--baseline", str(tmp_path / "no"), "--data", reviews)
    assert message == f"no trained model: {tmp_path}/no is not a directory"


def test_the_table_has_per_cent_and_means_of_what_several_tasks_have():
    """The mean of two accuracies and of two coefficients; none of what chose a model, or one task has."""
    tasks = {
        "MR": {"accuracy": 0.8, "C": 4.0},
        "TREC": {"accuracy": 0.7, "cv_accuracy": 0.75},
        "MRPC": {"accuracy": math.nan, "f1": 0.5, "cv_accuracy": 0.6, "undefined": "no pairs"},
        "SICK": {"spearman": 0.61, "mse": 0.3, "dev_spearman": 0.2},
        "STS12": {"spearman": 0.5, "dev_spearman": 0.4},
    }
    lines = [line.split("  ") for line in table_lines(tasks)]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    assert cells[-2:] == [
        ["mean of 2 tasks", "accuracy", "75.00%"],
        ["mean of 2 tasks", "spearman", "55.50%"],
    ]
    assert ["SICK", "mse", "0.3000"] in cells
    assert ["MRPC", "accuracy", "–"] in cells
    assert sum(cell[0].startswith("mean") for cell in cells) == 2

    lower = {name: {each: -0.1 for each in figures if each == "accuracy"} for name, figures in tasks.items()}
    assert table_lines(tasks, lower, "other")[0].split() == ["task", "figure", "model", "other", "difference"]
    assert table_lines(tasks, lower, "other")[1].split()[-3:] == ["80.00%", "-10.00%", "+90.00"]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_long_task_shows_that_it_lives(monkeypatch, capsys, terminal):
    """On a terminal the bar moves, and elsewhere there are lines; after the task there is nothing more."""
    told, moved = threading.Event(), threading.Event()
    bar = SimpleNamespace(refresh=moved.set)
    monkeypatch.setattr(alive, "TICK" if terminal else "WORD", 0.001)
    monkeypatch.setattr(alive, "say", lambda text: text.startswith("TREC: ") and told.set())
    monkeypatch.setattr(alive.sys.stderr, "isatty", lambda: terminal, raising=False)
    with alive.alive(bar, "TREC"):
        assert (moved if terminal else told).wait(60)
    assert not (told if terminal else moved).is_set()
    assert not any(thread.name == "alive" for thread in threading.enumerate())


def test_progress_is_told_line_by_line_where_there_is_no_terminal(model, reviews, capsys, monkeypatch):
    _, lines = evaluated(capsys, model, "--data", reviews)
    assert lines[0] == "encode: 46 of 46 sentences"
    assert [line.split(":")[0] for line in lines[1:]] == ["MR", "STS12"]
    assert [line.split(", ")[1] for line in lines[1:]] == ["1 of 2 tasks", "2 of 2 tasks"]

    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stderr", terminal)
    assert main(["evaluate", model, "--data", reviews]) == 0
    assert "of 2 tasks" not in terminal.getvalue()
    assert "\r" in terminal.getvalue()  # of the bars


def test_long_encoding_tells_how_far_it_is(monkeypatch, capsys):
    """At most one line in so many seconds, and one at the end."""
    from fastqt.sentences.evaluation import vectors

    monkeypatch.setattr(vectors, "BATCH", 2)
    texts = [f"sentence {number}" for number in range(7)]
    for pause, counts in ((-1.0, [2, 4, 6, 7]), (1e9, [7])):
        monkeypatch.setattr(vectors, "PAUSE", pause)
        vectors.embed(lambda batch: [[1.0]] * len(batch), texts)
        told = capsys.readouterr().err.splitlines()
        assert told == [f"encode: {count} of 7 sentences" for count in counts]
    vectors.embed(lambda batch: [[1.0]] * len(batch), texts, progress=False)
    assert capsys.readouterr().err == ""


def test_a_retrieval_set_is_a_task_like_others(model, planted, tmp_path, capsys):
    """Sentences of the planted text look for themselves, and the model finds more of them than chance."""
    lines = list(dict.fromkeys(filter(None, Path(planted[0]).read_text().splitlines())))[:60]
    folder = tmp_path / "data" / "planted"
    (folder / "qrels").mkdir(parents=True)
    for name, letter in (("corpus", "d"), ("queries", "q")):
        rows = [json.dumps({"_id": f"{letter}{n}", "text": line}) for n, line in enumerate(lines)]
        (folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    rows = ["query-id\tcorpus-id\tscore", *(f"q{n}\td{n}\t1" for n in range(60))]
    (folder / "qrels" / "test.tsv").write_text("\n".join(rows) + "\n")

    out = tmp_path / "out.json"
    rows, _ = evaluated(capsys, model, "--data", tmp_path / "data", "--tasks", "planted", "--json", out)
    names = ["nDCG@10", "MRR@10", "MAP@1000", "recall@1", "recall@10", "recall@100"]
    assert [row[:2] for row in rows] == [["planted", name] for name in names]
    stored = json.loads(out.read_text())["tasks"]["planted"]
    shown = [float(row[2].removesuffix("%")) / 100 for row in rows]
    assert shown == pytest.approx([stored[name] for name in names], abs=1e-4)
    assert stored["recall@1"] > 0.9
    message = error_line(capsys, "evaluate", model, "--data", tmp_path / "data", "--tasks", "plants")
    assert message.startswith("tasks: want some of MR, ")
    assert message.endswith("planted, got 'plants'")


def test_a_task_that_fails_costs_no_other_its_results(model, reviews, tmp_path, capsys):
    """It is named with its reason in the output and in the file, and the exit status is 1."""
    (Path(reviews) / "STSB").mkdir()
    (Path(reviews) / "STSB" / "dev.tsv").write_text("g\t0.5\tplace1\tplace2\ng\t0.25\tplace1\tplace3\n")
    out = tmp_path / "out.json"
    for baseline in ([], ["--baseline"]):
        assert main(["evaluate", model, "--data", reviews, "--json", str(out), *baseline]) == 1
        shown, told = capsys.readouterr()
        reason = f"no such file: {reviews}/STSB/test.tsv.xz"
        assert told.startswith(f"STSB is left out: {reason}\n")
        stored = json.loads(out.read_text(), parse_constant=pytest.fail)
        assert stored["failed"] == {"STSB": reason}
        assert stored["unfinished"] == []
        assert stored["tasks"]["ALIGN"]["alignment"] is None
        undefined = f"ALIGN: not defined. {stored['tasks']['ALIGN']['undefined']}"
        remarks = [undefined, f"STSB: failed: {reason}"]
        assert shown.splitlines()[-2 * (1 + len(baseline)) :] == [
            *remarks,
            *(f"random {remark}" for remark in remarks if baseline),
        ]


def test_what_was_evaluated_is_kept_where_the_command_is_stopped(model, reviews, tmp_path, monkeypatch):
    out = tmp_path / "out.json"
    replace = Path.replace

    def stopped(self, target):  # after the first task
        replace(self, target)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", stopped)
    assert main(["evaluate", model, "--data", reviews, "--json", str(out)]) == 130
    stored = json.loads(out.read_text())
    assert (list(stored["tasks"]), stored["unfinished"]) == (["MR"], ["STS12"])


def test_results_that_cannot_be_written_are_shown(model, reviews, tmp_path, capsys, monkeypatch):
    """At the end; on the way the disk may only have been full for a while."""
    from fastqt.sentences.evaluation import suite

    def full(path, write):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(suite, "write_atomically", full)
    assert main(["evaluate", model, "--data", reviews, "--json", str(tmp_path / "out.json")]) == 2
    out, told = capsys.readouterr()
    assert [line.split()[0] for line in out.splitlines()] == ["MR", "STS12", "STS12"]
    assert told.splitlines()[-1] == f"fastqt: cannot write {tmp_path}/out.json: No space left on device"


def test_an_export_has_the_figures_of_an_evaluation(model, reviews, tmp_path, capsys):
    pytest.importorskip("sentence_transformers", reason="the extra st is not installed")
    pytest.importorskip("sklearn", reason="the extra eval is not installed")
    results = f"{model}/evaluation.json"
    assert main(["evaluate", model, "--data", reviews, "--json", results]) == 0
    accuracy = json.loads((tmp_path / "model/evaluation.json").read_text())["tasks"]["MR"]["accuracy"]
    capsys.readouterr()
    out = tmp_path / "out"
    words = ["export", model, "--format", "sentence-transformers", "--out", str(out)]
    assert main(words) == 0
    assert capsys.readouterr().out == f"{out}: sentence-transformers, vectors of width 16\n"
    card = (out / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: sentence-transformers\n")
    assert f"| MR accuracy | {accuracy:.4f} |" in card
    assert main([*words, "--raw", "--overwrite"]) == 0


def strictly(text):
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in {text[:200]}"))


def test_numbers_that_json_lacks_are_null():
    value = {"a": [math.nan, {"b": (math.inf, -math.inf, 1e308)}], "c": np.float64("nan"), "d": True}
    assert strictly(to_json(value)) == {"a": [None, {"b": [None, None, 1e308]}], "c": None, "d": True}


@pytest.mark.slow
def test_what_commands_write_is_json(planted, reviews, tmp_path, capsys):
    """Of a training that finds no correlation, and an evaluation with figures that are not defined."""
    pytest.importorskip("sentence_transformers", reason="the extra st is not installed")
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
    assert (
        main(["export", str(run), "--format", "sentence-transformers", "--out", str(tmp_path / "export")])
        == 0
    )
    assert main([*train[:3], str(tmp_path / "last"), *SMALL]) == 0  # without a checkpoint

    files = [path for path in tmp_path.rglob("*.json") if path.is_file()]
    names = {"config.json", "finished.json", "evaluation.json", "retrieval.json"}
    assert names <= {path.name for path in files}
    for path in files:
        strictly(path.read_text())
    assert strictly((run / "evaluation.json").read_text())["tasks"]["STS12"]["pearson"] is None

    # Figures that are null are read as none.
    assert "–" in next(line for line in closing_table(run).splitlines() if "spearman" in line)
    card = (tmp_path / "export" / "README.md").read_text().lower()
    assert "spearman" not in card.split("## versions")[0].split("| figure")[1]
