"""What is stored is whole at any time, and what is printed is short however much there is to say."""

import json

import pytest

from benchmarks.gpu import report
from benchmarks.gpu.processes import Outcome
from benchmarks.gpu.report import Report
from benchmarks.gpu.sections import Options
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


def test_no_path_of_the_owner_is_stored(tmp_path):
    found = made(tmp_path)
    found.add(Outcome("a", "failed", f'File "{ROOT}/benchmarks/x.py", line 1'))
    stored = found.path.read_text()
    assert str(ROOT) not in stored
    assert "./benchmarks/x.py" in stored


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
