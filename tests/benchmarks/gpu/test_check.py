"""benchmarks.gpu_check without a GPU: a dry run of everything, and its command line."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch

from benchmarks.gpu import build, report, sanitizer, tune, tuning
from benchmarks.gpu import check as gpu_check
from benchmarks.gpu.processes import Outcome
from benchmarks.gpu.sanitizer import sanitizer_verdict
from benchmarks.gpu.sections import NotTakenError, Options
from benchmarks.gpu.shapes import DRY_SHAPES
from benchmarks.gpu.stages import waves
from benchmarks.paths import RESULTS, ROOT

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


@pytest.mark.slow
def test_dry_run_prints_a_table_and_no_times(dry_run):
    """Those of an interpreter say nothing of a GPU."""
    run, content = dry_run
    assert content["benchmarks"]
    for name in ("machine", "smoke", "cases", "accuracy"):
        assert re.search(rf"^{name}\b.* done$", run.stdout, re.MULTILINE), name
    assert "×" not in run.stdout
    assert " ms" not in run.stdout
    assert report.NO_TIMES in run.stdout
    assert run.stdout.splitlines()[-1] == "nothing failed"
    assert len((run.stdout + run.stderr).splitlines()) <= 100


@pytest.mark.slow
def test_a_quick_dry_run_passes_and_stores_nothing(tmp_path):
    """What one types first, in a clean checkout."""
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--dry-run", "--quick"]
    before = set(RESULTS.rglob("*"))
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout
    assert run.stdout.splitlines()[-1] == "nothing failed"
    assert set(RESULTS.rglob("*")) == before


def test_a_dry_run_of_the_tuning_requires_an_output_path(capsys):
    with pytest.raises(SystemExit, match="2"):
        tune.main(["--dry-run"])
    assert "wants --out" in capsys.readouterr().err


def test_a_page_names_every_option(capsys):
    page = (ROOT / "docs/how-to/gpu.md").read_text()
    with pytest.raises(SystemExit, match="0"):
        gpu_check.main(["--help"])
    options = set(re.findall(r"--[\w-]+", capsys.readouterr().out)) - {"--help"}
    assert options >= {"--stage", "--out", "--quick", "--dry-run"}
    assert [option for option in options if f"`{option}" not in page] == []


def test_a_run_requires_a_gpu(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        gpu_check.main([])
    assert "no CUDA device was found" in capsys.readouterr().err


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
    limits = []
    monkeypatch.setattr(sanitizer, "run_section", lambda section, *_: limits.append(section.seconds) or ended)
    alone, *watched = sanitizer.sanitizer(DRY, 33)
    assert (alone["ok"], alone["detail"]) == (False, "exit status -11")
    assert [record["ok"] for record in watched] == [None, None]
    assert limits == [33, 33, 33]


@pytest.mark.parametrize("stage", ["all", "first", "speed", "checks"])
def test_main_exits_with_1_if_anything_failed(stage, monkeypatch, tmp_path, capsys):
    arguments = ["--dry-run", "--stage", stage, "--out", str(tmp_path / "run.json")]
    for status in ("failed", "done"):
        begun = []

        def ends(section, _, status=status, begun=begun):
            begun.append(section.name)
            return Outcome(section.name, status=status)

        monkeypatch.setattr(gpu_check, "run_section", ends)
        assert gpu_check.main(arguments) == (1 if status == "failed" else 0)
        assert sorted(begun) == sorted(s.name for wave in waves(stage, DRY) for s in wave)
    assert json.loads((tmp_path / "run.json").read_text())["stage"] == stage


def test_a_build_is_made_only_where_it_is_needed(monkeypatch):
    commands = []

    def run(command, **more):
        commands.append((command, more["env"]))
        return subprocess.CompletedProcess(command, 1, "compiling\n", "nvcc: fatal\n")

    monkeypatch.setattr(build.subprocess, "run", run)
    monkeypatch.setattr(build, "missing", lambda: "built")
    assert build.built(Options()) == (True, "a build is already there")
    monkeypatch.setattr(build, "missing", lambda: "fastqt was built without CUDA")
    with pytest.raises(NotTakenError, match="dry run"):
        build.built(DRY)
    monkeypatch.setattr(build, "cuda_home", lambda: None)
    with pytest.raises(NotTakenError, match="no CUDA toolkit has bin/nvcc and lib64"):
        build.built(Options())
    assert commands == []
    monkeypatch.setattr(build, "cuda_home", lambda: build.Path("/opt/cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.delenv("FASTQT_CUDA_HOME", raising=False)
    ok, detail = build.built(Options())
    ((command, environment),) = commands
    assert list(command[1:]) == ["setup.py", "build_ext", "--inplace"]
    assert environment["FASTQT_CUDA_HOME"] == "/opt/cuda"
    assert environment["TORCH_CUDA_ARCH_LIST"] == "9.0a"
    assert not ok
    assert "exit status 1; fastqt was built without CUDA\ncompiling\nnvcc: fatal" in detail


def test_a_toolkit_is_one_that_the_extension_can_be_linked_with(monkeypatch, tmp_path):
    """A script named nvcc that stands elsewhere is none."""
    monkeypatch.delenv("FASTQT_CUDA_HOME", raising=False)
    monkeypatch.setattr(build.shutil, "which", lambda _: str(tmp_path / "script" / "bin" / "nvcc"))
    for name in ("script/bin/nvcc", "whole/bin/nvcc", "whole/lib64/libcudart_static.a"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "script"))
    assert build.cuda_home() in (None, build.Path("/usr/local/cuda"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "whole"))
    assert build.cuda_home() == tmp_path / "whole"


@pytest.mark.slow
def test_what_is_built_is_asked_of_another_process():
    from fastqt.engines import ops

    assert build.missing() == (ops.cuda_error or "built")


def test_tuning_yields_the_table_that_it_wrote(monkeypatch):
    def main(arguments):
        folder = arguments[arguments.index("--out") + 1]
        (tuning.Path(folder) / "interpreter.json").write_text('{"scores": {}}')
        print("1 of 1 entries")
        return status

    monkeypatch.setattr(tuning.tune, "main", main)
    status = 0
    (record,) = tuning.tuned(DRY, 0.1)
    assert record == {
        "kind": "tuning",
        "exit_status": 0,
        "table": {"scores": {}},
        "output": ["1 of 1 entries"],
    }
    status = 1
    with pytest.raises(RuntimeError, match="want exit status 0, got 1: 1 of 1 entries"):
        list(tuning.tuned(DRY, 0.1))
