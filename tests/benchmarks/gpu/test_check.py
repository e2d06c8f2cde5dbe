"""benchmarks.gpu_check without a GPU: its dry run, command line, stages, sections and report."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch

from benchmarks.gpu import check as gpu_check
from benchmarks.gpu import stages
from benchmarks.gpu.processes import OVERHEAD, Outcome
from benchmarks.gpu.report import Report
from benchmarks.gpu.sanitizer import sanitizer_verdict
from benchmarks.gpu.sections import Options
from benchmarks.gpu.shapes import DRY_SHAPES
from benchmarks.gpu.stages import LONGEST_STAGE, STAGES, longest, waves
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
    assert passed == {"machine", "smoke", "warm", "cases", "accuracy", "behaviour"}
    names = {s["name"] for s in content["sections"]}
    assert names == {s.name for wave in waves("all", DRY) for s in wave}


@pytest.mark.slow
def test_dry_run_names_the_machine_and_not_its_owner(dry_run):
    machine = dry_run[1]["machine"]
    assert machine["device"] == "interpreter"
    assert machine["torch"] == torch.__version__
    wanted = {"device", "memory_bytes", "driver", "cuda", "torch", "triton", "python", "fastqt", "date"}
    assert set(machine) == wanted | {"packages", "compilers", "state", "gpu", "cores"}
    assert str(ROOT) not in json.dumps(dry_run[1])


@pytest.mark.slow
def test_dry_run_measures_every_contestant_beside_the_products(dry_run):
    rows = dry_run[1]["benchmarks"]
    for shape in DRY_SHAPES:
        mine = [row for row in rows if row["shape"] == shape.name]
        assert {"GEMMs", "fastqt", "eager", "compiled"} <= {row["contestant"] for row in mine}
        losses = {row["contestant"]: row["loss"] for row in mine if not row["graphed"]}
        for name in ("fastqt", "compiled"):  # all compute the same loss, eager PyTorch in 16 bits
            assert losses[name] == pytest.approx(losses["eager"], rel=5e-3)
        for row in mine:
            assert (row["reason"] is None) == (row["seconds"] is not None)
            if row["seconds"] is not None:
                assert row["ratio_to_gemm"] == pytest.approx(row["seconds"] / row["gemm_seconds"])
            assert row["meter_reason"] == "cpu has no such readings" or row["reason"]
    assert {row["graphed"] for row in rows} == {True, False}


def test_a_page_names_every_option(capsys):
    page = (ROOT / "docs/how-to/gpu.md").read_text()
    with pytest.raises(SystemExit, match="0"):
        gpu_check.main(["--help"])
    options = set(re.findall(r"--[\w-]+", capsys.readouterr().out)) - {"--help"}
    assert options >= {"--stage", "--out", "--quick", "--dry-run"}
    assert [option for option in options if f"`{option}" not in page] == []


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


EVERY = [Options(), Options(quick=True), Options(dry_run=True)]


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_takes_less_than_nine_minutes_even_if_everything_hangs(stage, monkeypatch):
    monkeypatch.setattr(stages, "importable_peers", lambda: ["quack-kernels"])
    for options in EVERY:
        found = waves(stage, options)
        seconds = sum(max(section.seconds for section in wave) + OVERHEAD for wave in found)
        assert seconds == longest(found) <= LONGEST_STAGE < 540
        names = [section.name for wave in found for section in wave]
        assert len(set(names)) == len(names)


def made(tmp_path):
    return Report("all", DRY, tmp_path / "deep" / "run.json")


def test_report_fails_with_a_check_or_a_section_but_not_with_one_out_of_time(tmp_path):
    found = made(tmp_path)
    for ok in (True, None):
        found.add(Outcome("checks", records=[{"kind": "check", "name": "c", "ok": ok, "detail": "why"}]))
    found.add(Outcome("slow", status="out of time", message="after 3 s"))
    assert found.failures == []
    found.add(Outcome("checks", records=[{"kind": "check", "name": "c", "ok": False, "detail": "why"}]))
    found.add(Outcome("broken", status="failed", message="why"))
    assert found.failures == ["checks: c: why", "broken: why"]
    stored = json.loads(found.path.read_text())
    assert stored["checks"][-1] == {"section": "checks", "name": "c", "ok": False, "detail": "why"}
    assert "checks: c: why" in found.text()
