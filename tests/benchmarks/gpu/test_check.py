"""benchmarks.gpu_check without a GPU: a dry run, and how failures are recorded."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial

import pytest
import torch

from benchmarks.gpu import check as gpu_check
from benchmarks.gpu import figures, sanitizer, sections, tune
from benchmarks.gpu.check import Report
from benchmarks.gpu.peers import PEERS
from benchmarks.gpu.sanitizer import SANITIZED, sanitizer_verdict
from benchmarks.gpu.sections import NotTakenError, Options, Outcome, Section, Verdict, check, run_section
from benchmarks.paths import ROOT

DRY = Options(dry_run=True)


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory) -> tuple[subprocess.CompletedProcess, dict]:
    path = tmp_path_factory.mktemp("gpu_check") / "run.json"
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--dry-run", "--out", str(path)]
    without = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(command, cwd=ROOT, env=without, capture_output=True, text=True)
    assert path.exists(), run.stderr
    return run, json.loads(path.read_text())


@pytest.mark.slow
def test_dry_run_passes_its_checks(dry_run):
    run, content = dry_run
    assert [s for s in content["sections"] if s["status"] != "done"] == []
    assert [c for c in content["checks"] if c["ok"] is False] == []
    assert run.returncode == 0
    passed = {c["section"].split(",")[0] for c in content["checks"] if c["ok"]}
    assert passed == {"cases", "accuracy", "behaviour"}
    names = {s["name"] for s in content["sections"]}
    assert names == {s.name for wave in gpu_check.waves(DRY) for s in wave}


@pytest.mark.slow
def test_dry_run_names_the_machine_and_not_its_owner(dry_run):
    machine = dry_run[1]["machine"]
    assert machine["device"] == "interpreter"
    assert machine["torch"] == torch.__version__
    wanted = {"device", "memory_bytes", "driver", "cuda", "torch", "triton", "python", "fastqt", "date"}
    assert set(machine) == wanted
    assert str(ROOT) not in json.dumps(dry_run[1])


@pytest.mark.slow
def test_dry_run_measures_every_contestant_beside_the_products(dry_run):
    rows = dry_run[1]["benchmarks"]
    for shape in figures.DRY_SHAPES:
        mine = [row for row in rows if row["shape"] == shape.name]
        assert {"GEMMs", "fastqt", "eager", "compiled", *PEERS} <= {row["contestant"] for row in mine}
        losses = {row["contestant"]: row["loss"] for row in mine if not row["graphed"]}
        for name in ("fastqt", "compiled"):  # all compute the same loss, eager PyTorch in 16 bits
            assert losses[name] == pytest.approx(losses["eager"], rel=5e-3)
        for row in mine:
            assert (row["reason"] is None) == (row["seconds"] is not None)
            if row["seconds"] is not None:
                assert row["ratio_to_gemm"] == pytest.approx(row["seconds"] / row["gemm_seconds"])
    assert {row["graphed"] for row in rows} == {True, False}


@pytest.mark.slow
def test_dry_run_prints_a_table(dry_run):
    run, content = dry_run
    for row in content["benchmarks"]:
        assert any(row["shape"] in line and row["contestant"] in line for line in run.stdout.splitlines())
    assert run.stdout.splitlines()[-1] == "nothing failed"


def test_everything_ends_within_8_minutes():
    for options in (Options(), Options(quick=True), DRY):
        waves = gpu_check.waves(options)
        assert sum(max(s.seconds for s in wave) + sections.GRACE for wave in waves) < 480
        assert len({s.name for wave in waves for s in wave}) == sum(map(len, waves))
    within = SANITIZED.seconds + sections.GRACE
    assert 3 * within <= gpu_check.find_section("sanitizer", DRY).seconds


def test_dry_run_requires_an_output_path(capsys):
    for program in (gpu_check, tune):
        with pytest.raises(SystemExit, match="2"):
            program.main(["--dry-run"])
        assert "wants --out" in capsys.readouterr().err


def test_a_check_records_what_was_raised():
    def refused():
        raise NotTakenError("backend: no")

    assert check("x", lambda: Verdict(True, "fine")) == {
        "kind": "check",
        "name": "x",
        "ok": True,
        "detail": "fine",
    }
    broken = check("x", lambda: Verdict(bool(1 // 0), ""))
    assert broken["ok"] is False
    assert broken["detail"].startswith("ZeroDivisionError")
    assert check("x", refused)["ok"] is None


@pytest.mark.parametrize(
    ("exit_code", "output", "ok"),
    [
        (0, "lines\n========= ERROR SUMMARY: 0 errors\n", True),
        (0, "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", True),
        (0, "========= RACECHECK SUMMARY: 2 hazards displayed (0 errors, 2 warnings)", False),
        (86, "========= ERROR SUMMARY: 3 errors", False),
        (0, "nothing was watched", None),
        (1, "========= Error: Device not supported", None),
        (None, "", None),
    ],
)
def test_sanitizer_passes_only_with_a_summary(exit_code, output, ok):
    assert sanitizer_verdict(exit_code, output).ok is ok


def test_sanitizer_reports_calls_that_fail_without_a_tool(monkeypatch):
    monkeypatch.setattr(sanitizer.shutil, "which", lambda *_, **__: "compute-sanitizer")
    ended = Outcome("sanitized", status="failed", message="exit status -11", exit_code=-11)
    monkeypatch.setattr(sanitizer, "run_section", lambda *_: ended)
    alone, *watched = sanitizer.sanitizer(DRY)
    assert (alone["ok"], alone["detail"]) == (False, "exit status -11")
    assert [record["ok"] for record in watched] == [None, None]


def records_then(ending):
    def records(options):
        yield check("first", lambda: Verdict(True, ""))
        ending()
        yield check("second", lambda: Verdict(True, ""))

    return records


def fail():
    raise RuntimeError("the device is gone")


def test_a_failing_section_keeps_what_it_found(tmp_path):
    lines = tmp_path / "lines"
    with pytest.raises(RuntimeError, match="the device is gone"):
        sections.write_lines(Section("s", 60, records_then(fail)), DRY, lines)
    first, end = sections.read_lines(lines)
    assert first["name"] == "first"
    assert end == {"kind": "end", "status": "failed", "message": "RuntimeError: the device is gone"}


def test_a_section_stops_when_its_time_ends(tmp_path):
    lines = tmp_path / "lines"
    sections.write_lines(Section("s", 0.01, records_then(partial(time.sleep, 0.02))), DRY, lines)
    names = [record.get("name", record.get("status")) for record in sections.read_lines(lines)]
    assert names == ["first", "second", "out of time"]
    sections.write_lines(Section("s", 0.0, records_then(fail)), DRY, lines)
    assert [r.get("name", r.get("status")) for r in sections.read_lines(lines)] == [
        "first",
        "out of time",
    ]


def test_an_incomplete_line_is_skipped(tmp_path):
    (tmp_path / "lines").write_text('{"kind": "end"}\n{"kind": "che')
    assert sections.read_lines(tmp_path / "lines") == [{"kind": "end"}]
    assert sections.read_lines(tmp_path / "none") == []


def test_a_section_that_hangs_is_ended(monkeypatch):
    monkeypatch.setattr(sections, "GRACE", 0.0)
    outcome = run_section(replace(gpu_check.find_section("machine", DRY), seconds=0.05), DRY)
    assert (outcome.status, outcome.exit_code) == ("failed", None)
    assert "did not end" in outcome.message


def test_a_section_that_dies_is_failed():
    outcome = run_section(Section("no such section", 60, fail), DRY)
    assert outcome.status == "failed"
    assert outcome.message.startswith("exit status 1: ")


@pytest.mark.parametrize("ok", [True, None, False])
def test_report_fails_with_a_check(ok, tmp_path):
    report = Report(DRY, tmp_path / "deep" / "run.json")
    found = {"kind": "check", "name": "c", "ok": ok, "detail": "why"}
    report.add(Outcome("checks", records=[found]))
    assert report.failures == ([] if ok is not False else ["checks: c: why"])
    stored = json.loads(report.path.read_text())
    assert stored["checks"] == [{"section": "checks", "name": "c", "ok": ok, "detail": "why"}]
    assert ("checks: c: why" in report.text()) is (ok is False)


def test_report_fails_with_a_failed_section_but_not_with_one_out_of_time():
    report = Report(DRY, None)
    report.add(Outcome("slow", status="out of time", message="after 3 s"))
    assert report.failures == []
    report.add(Outcome("broken", status="failed", message="why"))
    assert report.failures == ["broken: why"]


def test_main_exits_with_1_if_anything_failed(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(gpu_check, "run_section", lambda section, _: Outcome(section.name, status="failed"))
    arguments = ["--dry-run", "--out", str(tmp_path / "run.json")]
    assert gpu_check.main(arguments) == 1
    monkeypatch.setattr(gpu_check, "run_section", lambda section, _: Outcome(section.name))
    assert gpu_check.main(arguments) == 0
