"""Whatever goes wrong in a section of the check on a GPU, the stored result names the cause."""

import json

import pytest

from benchmarks.gpu import check as gpu_check
from benchmarks.gpu import processes
from benchmarks.gpu.processes import Outcome
from benchmarks.gpu.report import Report
from benchmarks.gpu.sections import Options
from benchmarks.gpu.smoke.scores import DRY_SIZES
from tests.benchmarks.gpu import failing_sections
from tests.benchmarks.gpu.failing_sections import ILLEGAL, QUIET, section

DRY = Options(dry_run=True)


@pytest.fixture
def stored(tmp_path, monkeypatch):
    """Runs a section as the check does; returns it as stored, its checks, and the text that is printed."""

    def run(name, **more):
        monkeypatch.setattr(processes, "GRACE", 1.0)
        report = Report("first", DRY, tmp_path / "run.json")
        gpu_check.run([[section(name, **more)]], DRY, report)
        content = json.loads(report.path.read_text())
        assert report.failures
        return content["sections"][0], content["checks"], report.text()

    return run


def test_an_import(stored):
    found, _, text = stored("absent_import")
    assert found["message"] == "ModuleNotFoundError: No module named 'no_such_library'"
    assert "failing_sections.py" in found["output"]
    assert found["message"] in text


def test_a_hang(stored):
    found, checks, text = stored("hang", quiet=QUIET)
    assert [c["name"] for c in checks] == ["first"]
    assert found["message"].startswith("it hung in the check 'sleeps', at failing_sections.py:")
    assert found["seconds"] < 30
    assert "most recent call first" in found["output"]
    assert found["message"] in text


def test_a_hang_that_keeps_python_from_running(stored):
    found, *_ = stored("hang_with_the_interpreter_locked", quiet=QUIET)
    assert found["message"].startswith("it hung in the check 'backtracks', at ")


def test_a_process_that_is_stopped(stored):
    found, *_ = stored("stopped", seconds=0.5)
    assert found["message"].startswith("it hung in the check 'stops'")
    assert "killed from outside" in found["message"]


def test_a_crash(stored):
    found, _, text = stored("crash")
    cause = "SIGSEGV in the check 'reads address 0': Fatal Python error: Segmentation fault"
    assert found["message"] == cause
    assert "string_at" in found["output"]
    assert cause in text


def test_a_kill(stored):
    found, *_ = stored("killed")
    assert found["message"].startswith("SIGKILL in the check 'is killed'")


@pytest.fixture
def stored_here(tmp_path):
    """The same of a section that runs in this process."""

    def run(name):
        report = Report("first", DRY, tmp_path / "run.json")
        report.add(Outcome(name, records=list(section(name).records(DRY))))
        content = json.loads(report.path.read_text())
        return content["checks"], report.text()

    return run


def test_a_launch(stored_here):
    checks, text = stored_here("launch")
    assert [check["name"] for check in checks] == ["plain", "descriptors"]
    for check in checks:
        assert not check["ok"]
        assert check["detail"] == f"RuntimeError: {ILLEGAL}"
        assert "kernels/scores/launch.py" in check["traceback"]
        (launch,) = check["evidence"]["launches"]
        assert launch["name"] == "scores_kernel"
        N, M, D = DRY_SIZES
        assert f"float16 ({N}, {D}), strides ({D}, 1), cpu" in launch["arguments"]["queries"]
        assert f"float16 ({N}, {M})" in launch["arguments"]["out"]
        assert launch["arguments"]["EPILOGUE"] == "EXP"
    assert [("blocks" in c["evidence"]["launches"][0]["arguments"]["queries"]) for c in checks] == [
        False,
        True,
    ]
    assert ILLEGAL in text


def test_a_wrong_value(stored_here):
    checks, text = stored_here("wrong_value")
    assert [check["name"] for check in checks] == ["plain", "descriptors"]
    for check in checks:
        assert not check["ok"]
        assert check["detail"].startswith("wrong: row sums; row sums 1.0e-02 (at most 1.0e-03), matrix ")
        assert check["evidence"]["launches"][-1]["name"] == "scores_kernel"
    assert "wrong: row sums" in text


@pytest.mark.slow
def test_a_compilation(stored):
    """The cause is at the end of a long error, and ptxas's error comes with what it was given."""
    _, (undefined, unknown), text = stored("compilation", own_cache=True)
    assert undefined["detail"].startswith("CompilationError: ")
    assert "inner(tl.load" in undefined["detail"]
    assert "undefined_name is not defined" in undefined["detail"].splitlines()[-1]
    assert "undefined_name is not defined" in text
    assert "Not a name of any known instruction: 'no'" in unknown["detail"]
    assert "Unknown modifier '.such'" in text
    dumped = unknown["evidence"]["compiled"]
    assert any("no.such.f32" in content for name, content in dumped.items() if name.endswith(".ptx"))
    assert any(name.endswith(".ttgir") for name in dumped)


def test_sections_go_on_after_one_that_fails(tmp_path):
    report = Report("first", DRY, tmp_path / "run.json")
    names = ("crash", "absent_import", "killed")
    gpu_check.run([[section(name) for name in names[:2]], [section(names[2])]], DRY, report)
    assert {s["name"] for s in json.loads(report.path.read_text())["sections"]} == set(names)
    assert set(dir(failing_sections)) >= set(names)
