"""A stage ends in time whatever hangs, and each of its sections is one that a process can find."""

import importlib
import json
import shutil
import subprocess
import sys
from dataclasses import asdict

import pytest

from benchmarks.gpu import check as gpu_check
from benchmarks.gpu import stages
from benchmarks.gpu.processes import GRACE, OVERHEAD
from benchmarks.gpu.sections import Options
from benchmarks.gpu.stages import LONGEST_SMOKE, LONGEST_STAGE, STAGES, longest, smoke, waves
from benchmarks.paths import ROOT

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


def test_the_smoke_stage_takes_at_most_a_minute():
    assert longest(smoke()) <= LONGEST_SMOKE
    for section in (section for wave in smoke() for section in wave):
        assert section.quiet == (None if section.name == "machine" else 10)
        assert section.own_cache is (section.name != "machine")


def test_the_limit_of_a_wave_holds_where_it_has_more_sections_than_processes(tmp_path, monkeypatch):
    """Sections that wait for a process have less time, or none."""
    begun = []
    monkeypatch.setattr(gpu_check, "processors", lambda: 1)
    monkeypatch.setattr(gpu_check, "LEAST_SECONDS", 0.1)

    def hangs(section, options):
        begun.append(section.seconds)
        gpu_check.time.sleep(section.seconds)
        return gpu_check.Outcome(section.name, "failed")

    monkeypatch.setattr(gpu_check, "run_section", hangs)
    report = gpu_check.Report("checks", Options(), tmp_path / "run.json")
    wave = [stages.Section(str(k), 0.4, "a:b") for k in range(5)]
    gpu_check.run([wave], Options(), report)
    assert len(begun) == 2
    assert sum(section["status"] == "out of time" for section in report.content["sections"]) == 3


def test_a_sanitizer_has_time_for_the_calls_three_times():
    for stage in ("all", "checks"):
        (found,) = (s for wave in waves(stage, Options()) for s in wave if s.name == "sanitizer")
        assert 3 * (found.arguments["seconds"] + GRACE) <= found.seconds


def test_the_first_stage_watches_the_kernels_of_large_problems():
    (section,) = (s for wave in waves("first", Options()) for s in wave if s.name.startswith("memcheck"))
    assert section.arguments["seconds"] + OVERHEAD <= section.seconds
    (record,) = section.records(Options(dry_run=True))
    assert record["ok"] is None or shutil.which("compute-sanitizer")


@pytest.mark.parametrize("stage", STAGES)
def test_sections_name_functions_that_there_are(stage):
    for section in (s for options in EVERY for wave in waves(stage, options) for s in wave):
        module, function = section.run.split(":")
        assert callable(getattr(importlib.import_module(module), function))
        json.dumps(asdict(section))


def test_benchmarks_come_before_the_exhaustive_checks_and_the_smoke_steps_before_all():
    order = [wave[0].name.split(",")[0] for wave in waves("all", Options())]
    assert order[0] == "machine"
    assert order.index("smoke") < order.index("warm") < order.index("benchmark") < order.index("cases")


def test_everything_that_is_measured_is_compiled_before():
    from benchmarks.gpu import figures
    from benchmarks.gpu.shapes import SHAPES, Shape

    ((*sections,),) = stages.warming(Options())
    warmed = {(Shape(*s.arguments["sizes"]), s.arguments["memory"]) for s in sections}
    for shape in SHAPES:
        for name in figures.fused_and_eager(shape):
            if name.startswith("fastqt"):
                assert (shape, "low" if name.endswith("low") else "fast") in warmed


def test_libraries_that_are_absent_get_no_section(monkeypatch):
    from benchmarks.gpu.peers import PEERS

    assert set(PEERS) == set(stages.MODULES)
    for present in (False, True):
        monkeypatch.setattr(stages, "find_spec", lambda _, present=present: object() if present else None)
        names = [section.name for wave in waves("speed", Options()) for section in wave]
        assert ("peers" in names) is present


def test_the_command_line_itself_imports_neither_torch_nor_fastqt():
    """So that an import that fails is a section's, and is stored."""
    program = "import benchmarks.gpu.check, sys; print({'torch', 'fastqt', 'triton'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert run.stdout == "set()\n", run.stderr


def test_a_checkout_is_enough():
    """The kernels are found beside fastqt where neither is installed."""
    program = (
        "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in str(f).lower()];"
        "import fastqt.kernels; print(list(fastqt.kernels.__path__))"
    )
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert run.stdout.strip() == str([str(ROOT / "kernels")]), run.stderr
