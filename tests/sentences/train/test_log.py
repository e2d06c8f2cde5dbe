"""The metrics file of a training: what a resumed training finds in it and appends to it."""

import json

import pytest

from fastqt.errors import InputError
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


def test_a_log_that_lost_lines_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"metrics\.jsonl is shorter than it was"):
        MetricsLog(tmp_path / "metrics.jsonl", 10)
