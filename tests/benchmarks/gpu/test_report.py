"""What is stored is whole at any time, and what is printed is short however much there is to say."""

import json

import pytest

from benchmarks.gpu import figures, report
from benchmarks.gpu.peers import PEERS
from benchmarks.gpu.processes import Outcome
from benchmarks.gpu.report import Report
from benchmarks.gpu.sections import Options
from benchmarks.gpu.shapes import LARGEST_GRAPHED, SHAPES
from benchmarks.gpu.stages import MODULES, STAGES, waves
from benchmarks.paths import ROOT

DRY = Options(dry_run=True)


def made(tmp_path):
    return Report("all", DRY, tmp_path / "deep" / "run.json")


@pytest.mark.parametrize("ok", [True, None, False])
def test_report_fails_with_a_check(ok, tmp_path):
    found = made(tmp_path)
    found.add(Outcome("checks", records=[{"kind": "check", "name": "c", "ok": ok, "detail": "why"}]))
    assert found.failures == ([] if ok is not False else ["checks: c: why"])
    stored = json.loads(found.path.read_text())
    assert stored["checks"] == [{"section": "checks", "name": "c", "ok": ok, "detail": "why"}]
    assert ("checks: c: why" in found.text()) is (ok is False)


def test_report_fails_with_a_failed_section_but_not_with_one_out_of_time(tmp_path):
    found = made(tmp_path)
    found.add(Outcome("slow", status="out of time", message="after 3 s"))
    assert found.failures == []
    found.add(Outcome("broken", status="failed", message="why"))
    assert found.failures == ["broken: why"]


def test_the_file_is_there_from_the_beginning_and_is_replaced_as_a_whole(tmp_path, monkeypatch):
    found = made(tmp_path)
    assert json.loads(found.path.read_text())["stage"] == "all"
    found.add(Outcome("first"))
    before = found.path.read_text()

    def cut_short(path, text):
        with path.open("w") as file:
            file.write(text[:10])
        raise OSError("no space left")

    monkeypatch.setattr(report.Path, "write_text", cut_short)
    with pytest.raises(OSError, match="no space"):
        found.add(Outcome("second"))
    assert found.path.read_text() == before


def test_no_path_of_the_owner_is_stored(tmp_path):
    found = made(tmp_path)
    found.add(Outcome("a", "failed", f'File "{ROOT}/benchmarks/x.py", line 1'))
    stored = found.path.read_text()
    assert str(ROOT) not in stored
    assert "./benchmarks/x.py" in stored


@pytest.mark.parametrize("stage", STAGES)
def test_the_text_has_at_most_100_lines_and_12000_characters(tmp_path, stage):
    """Even if every check fails with a long error, and everything is measured."""
    found = made(tmp_path)
    found.write = lambda: None
    found.content["dropped"] = dict.fromkeys(MODULES, "is not installed")
    long = "RuntimeError: " + "\n".join(["an error " * 20] * 10)
    for section in (section for wave in waves(stage, Options()) for section in wave):
        records = [{"kind": "check", "name": f"{k}", "ok": False, "detail": long} for k in range(20)]
        found.add(Outcome(section.name, "failed", long, 99.0, records))
    machine = dict.fromkeys("abcdefghijklmnop", "x" * 150)
    rows = [
        {"kind": "benchmark", "shape": shape.name, "graphed": graphed, "contestant": name}
        | {"seconds": 0.1, "ratio_to_gemm": 1.234, "predicted_ratio": 1.2}
        for graphed in (False, True)
        for shape in SHAPES
        if shape.N <= LARGEST_GRAPHED or not graphed
        for name in ("GEMMs", *figures.fused_and_eager(shape), *(() if graphed else (*PEERS, "compiled")))
    ]
    kernels = [{"name": "k" * 160, "count": 1000, "seconds": 0.01}] * 16
    products = [
        {"kind": "product", "name": "Eᵀ·F 65536×768×5632 beta=1", "seconds": 0.1, "tflops": 700.0}
        | {"kernels": kernels, "reason": None}
        for _ in range(9)
    ]
    profiles = [
        {"kind": "profile", "shape": SHAPES[0].name, "memory": "fast", "launches": 1000.0}
        | {"kernel_seconds": 0.1, "seconds_to_launch": 0.1, "kernels": kernels, "reason": None}
        for _ in range(6)
    ]
    if stage in ("all", "speed"):
        found.add(Outcome("benchmark", records=rows))
    if stage in ("all", "first"):
        found.add(Outcome("vendor", records=products))
    if stage == "first":
        found.add(Outcome("profile", records=profiles))
    if stage == "speed":
        found.add(Outcome("t", records=[{"kind": "tuning", "output": 20 * ["line " * 40]}]))
    found.add(Outcome("machine", records=[{"kind": "machine", **machine}]))
    text = found.text()
    assert len(text.splitlines()) <= 100 - len(waves(stage, Options()))  # a line for each wave comes before
    assert len(text) < 11_000
    assert "more, in run.json" in text


def test_only_the_first_failures_of_a_section_are_stored_with_all_that_is_known(tmp_path):
    found = made(tmp_path)
    failed = {"kind": "check", "ok": False, "detail": "why", "traceback": "lines", "evidence": {}}
    found.add(Outcome("s", records=[{**failed, "name": f"{k}"} for k in range(10)]))
    told = ["traceback" in check and "evidence" in check for check in found.content["checks"]]
    assert told == [True] * report.TOLD_AT_LENGTH + [False] * (10 - report.TOLD_AT_LENGTH)
    assert all(check["detail"] == "why" for check in found.content["checks"])


def test_a_line_has_a_shape_with_all_that_was_measured():
    rows = [
        {"shape": "s", "graphed": False, "contestant": name, "seconds": seconds}
        | {"ratio_to_gemm": ratio, "predicted_ratio": predicted}
        for name, seconds, ratio, predicted in (
            ("GEMMs", 2e-3, 1.0, None),
            ("ours", 3e-3, 1.5, 1.25),
            ("absent", None, None, None),
        )
    ]
    (line,) = report.time_lines(rows)
    assert line == "s: GEMMs 2.000 ms; ours 1.50× (predicted 1.25), absent –"
    (alone,) = report.time_lines([{**rows[1], "graphed": True, "ratio_to_gemm": None}])
    assert alone == "s graph: GEMMs –; ours 3.000 ms"
