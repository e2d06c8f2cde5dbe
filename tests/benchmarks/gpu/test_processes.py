"""How a section's process writes what it finds, and how that is read."""

import time
from functools import partial

import pytest

from benchmarks.gpu import processes
from benchmarks.gpu.processes import ended_early, read_lines, write_records
from benchmarks.gpu.sections import NotTakenError, Verdict, check

DUMP = """check first
check second
Timeout (0:00:10)!
Thread 0x1 (most recent call first):
  File "/a/worker.py", line 3 in worker
Thread 0x2 (most recent call first):
  File "/a/inner.py", line 7 in inner
  File "/a/outer.py", line 9 in outer
"""


def records_then(ending):
    yield check("first", lambda: Verdict(True, ""))
    ending()
    yield check("second", lambda: Verdict(True, ""))


def fail():
    raise RuntimeError("the device is gone")


def test_a_failing_section_keeps_what_it_found(tmp_path):
    lines = tmp_path / "lines"
    assert not write_records(records_then(fail), 60, lines)
    first, end = read_lines(lines)
    assert first["name"] == "first"
    traceback = end.pop("traceback")
    assert end == {"kind": "end", "status": "failed", "message": "RuntimeError: the device is gone"}
    assert "in fail" in traceback


def test_a_section_stops_when_its_time_ends(tmp_path):
    lines = tmp_path / "lines"
    assert write_records(records_then(partial(time.sleep, 0.02)), 0.01, lines)
    names = [record.get("name", record.get("status")) for record in read_lines(lines)]
    assert names == ["first", "second", "out of time"]
    assert write_records(records_then(fail), 0.0, lines)
    assert [r.get("name", r.get("status")) for r in read_lines(lines)] == ["first", "out of time"]


def test_an_incomplete_line_is_skipped(tmp_path):
    (tmp_path / "lines").write_text('{"kind": "end"}\n{"kind": "che')
    assert read_lines(tmp_path / "lines") == [{"kind": "end"}]
    assert read_lines(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("exit_code", "output", "said"),
    [
        (1, DUMP, "it hung in the check 'second', at inner.py:7, inner"),
        (None, DUMP, "it hung in the check 'second', at inner.py:7, inner"),
        (None, "check first\n", "it hung in the check 'first', and was killed from outside"),
        (None, "", "it hung, and was killed from outside"),
        (3, "one\ntwo\n", "exit status 3: two"),
        (1, "", "exit status 1: no output"),
        (-9, "check first\n", "SIGKILL in the check 'first': no output"),
        (-6, "Fatal Python error: Aborted\n\nframes", "SIGABRT: Fatal Python error: Aborted"),
    ],
)
def test_the_end_of_a_process_is_said_in_words(exit_code, output, said):
    assert ended_early(exit_code, output) == said


def test_a_check_records_what_was_raised():
    def refused():
        raise NotTakenError("backend: no")

    passed = {"kind": "check", "name": "x", "ok": True, "detail": "fine"}
    assert check("x", lambda: Verdict(True, "fine")) == passed
    broken = check("x", lambda: Verdict(bool(1 // 0), ""))
    assert broken["ok"] is False
    assert broken["detail"].startswith("ZeroDivisionError")
    assert "1 // 0" in broken["traceback"]
    assert check("x", refused)["ok"] is None


def test_an_output_is_kept_of_a_section_that_fails_alone():
    long = processes.MOST_OUTPUT * "a" + "the end"
    failed = processes.Outcome("s", "failed", output=long)
    assert processes.kept_output(failed).endswith("the end")
    assert len(processes.kept_output(failed)) < processes.MOST_OUTPUT + 100
    assert processes.kept_output(processes.Outcome("s", output=long)) is None
