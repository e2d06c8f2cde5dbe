"""The metrics file of a training: what a resumed training finds in it and appends to it."""

import json

from fastqt.sentences.runs.metrics_file import read_metrics
from fastqt.sentences.train.log import MetricsLog


def test_the_log_is_cut_back_and_appended_to(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.write({"step": 1, "loss": 0.5})
    length = log.sync()
    for step in (2, 3):
        log.write({"step": step, "loss": 0.25})
    log.close()
    log = MetricsLog(path, length)
    log.write({"step": 2, "loss": 0.125})
    log.close()
    assert [json.loads(line)["loss"] for line in path.read_text().splitlines()] == [0.5, 0.125]


def test_a_log_that_lost_lines_goes_on(tmp_path, capsys):
    """It only tells of a training, which nobody could continue otherwise."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st')
    log = MetricsLog(path, 99)
    log.write({"step": 2})
    assert log.sync() == path.stat().st_size
    path.unlink()  # while the training runs
    log.write({"step": 3})
    log.close()
    assert [line["step"] for line in read_metrics(path)] == [3]
    warnings = capsys.readouterr().err.splitlines()
    assert [line.split("metrics.jsonl ")[1] for line in warnings] == [
        "has lost lines: it has 16 bytes of 99",
        "has lost lines: it has 0 bytes of 29",
    ]


def test_lines_that_cannot_be_written_are_written_later(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.write({"step": 1})
    path.rename(tmp_path / "elsewhere")
    path.mkdir()
    for step in (2, 3):
        log.write({"step": step})
    assert log.sync() == len('{"step": 1}\n') * 3
    path.rmdir()
    (tmp_path / "elsewhere").rename(path)
    log.close()
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3]
    assert capsys.readouterr().err == (
        f"fastqt: warning: {path} cannot be written: Is a directory; the training goes on\n"
    )
