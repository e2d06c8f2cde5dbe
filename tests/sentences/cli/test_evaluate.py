"""The command evaluate: a baseline beside the model, and what it tells while it works."""

import io
import json
from pathlib import Path

import pytest

from fastqt.sentences.cli import main
from tests.shared.command_lines import error_line


def evaluated(capsys, *arguments):
    """The rows that the command prints and the lines of its progress."""
    assert main(["evaluate", *map(str, arguments)]) == 0
    out, err = capsys.readouterr()
    return [line.split() for line in out.splitlines()], err.splitlines()


def test_the_baseline_stands_beside_the_model(model, reviews, tmp_path, capsys):
    """Its figures are those of an evaluation of its own."""
    both, own, alone = (tmp_path / f"{name}.json" for name in ("both", "own", "alone"))
    rows, told = evaluated(capsys, model, "--data", reviews, "--baseline", "--seed", 3, "--json", both)
    assert told[3] == "the same with random weights"
    assert len(told) == 7
    ours, _ = evaluated(capsys, model, "--data", reviews, "--seed", 3, "--json", own)
    theirs, _ = evaluated(capsys, f"random:{model}", "--data", reviews, "--seed", 3, "--json", alone)
    assert rows[0] == ["task", "figure", "model", "random"]
    assert rows[1:] == [[*one, other[-1]] for one, other in zip(ours, theirs, strict=True)]
    assert any(row[-1] != row[-2] for row in rows[1:])

    stored, model_alone, random_alone = (json.loads(path.read_text()) for path in (both, own, alone))
    assert stored["baseline"]["model"] == f"random:{model}"
    for name in ("tasks", "sha256", "settings", "width"):
        assert stored[name] == model_alone[name]
        assert stored["baseline"][name] == random_alone[name]
    assert "baseline" not in model_alone


@pytest.mark.parametrize("name", ["random:{}", "word-vectors:none.npz", "none"])
def test_only_a_trained_model_has_a_baseline(model, reviews, capsys, name):
    name = name.format(model)
    message = error_line(capsys, "evaluate", name, "--data", reviews, "--baseline")
    assert message == f"baseline: want a directory that train wrote as MODEL, got {name}"


def test_progress_is_told_line_by_line_where_there_is_no_terminal(model, reviews, capsys, monkeypatch):
    _, lines = evaluated(capsys, model, "--data", reviews)
    assert lines[0] == "encode: 46 of 46 sentences"
    assert [line.split(":")[0] for line in lines[1:]] == ["MR", "STS12"]
    assert [line.split(", ")[1] for line in lines[1:]] == ["1 of 2 tasks", "2 of 2 tasks"]

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
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
    with open(planted[0]) as file:
        lines = list(dict.fromkeys(line.strip() for line in file if line.strip()))[:60]
    folder = tmp_path / "data" / "planted"
    (folder / "qrels").mkdir(parents=True)
    for name, letter in (("corpus", "d"), ("queries", "q")):
        rows = [json.dumps({"_id": f"{letter}{n}", "text": line}) for n, line in enumerate(lines)]
        (folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    rows = ["query-id\tcorpus-id\tscore", *(f"q{n}\td{n}\t1" for n in range(len(lines)))]
    (folder / "qrels" / "test.tsv").write_text("\n".join(rows) + "\n")

    out = tmp_path / "out.json"
    words = (model, "--data", tmp_path / "data", "--tasks", "planted", "--baseline", "--json", out)
    rows, progress = evaluated(capsys, *words)
    assert rows[0] == ["task", "figure", "model", "random"]
    names = ["nDCG@10", "MRR@10", "MAP@1000", "recall@1", "recall@10", "recall@100"]
    assert [row[:2] for row in rows[1:]] == [["planted", name] for name in names]
    stored = json.loads(out.read_text())["tasks"]["planted"]
    assert stored["sizes"] == {"queries": 60, "documents": 60, "judgements": 60}
    assert [float(row[2]) for row in rows[1:]] == pytest.approx([stored[name] for name in names], abs=1e-4)
    assert stored["recall@1"] > 0.9
    assert progress[-1].startswith("planted: ")

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


def test_what_was_evaluated_is_kept_where_the_command_is_stopped(
    model, reviews, tmp_path, capsys, monkeypatch
):
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
