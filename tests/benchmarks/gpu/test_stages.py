"""A stage ends in time whatever hangs, and each of its sections is one that a process can find."""

import importlib
import json
import subprocess
import sys
from dataclasses import asdict

import pytest

from benchmarks.gpu import stages
from benchmarks.gpu.processes import OVERHEAD
from benchmarks.gpu.sections import Options
from benchmarks.gpu.stages import LONGEST_STAGE, STAGES, longest, waves
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


@pytest.mark.parametrize("stage", STAGES)
def test_sections_name_functions_that_there_are(stage):
    for section in (s for options in EVERY for wave in waves(stage, options) for s in wave):
        module, function = section.run.split(":")
        assert callable(getattr(importlib.import_module(module), function))
        json.dumps(asdict(section))


def test_everything_that_is_measured_is_compiled_before():
    from benchmarks.gpu import figures
    from benchmarks.gpu.shapes import SHAPES, Shape

    ((*sections,),) = stages.warming(Options())
    warmed = {(Shape(*s.arguments["sizes"]), s.arguments["memory"]) for s in sections}
    for shape in SHAPES:
        for name in figures.fused_and_eager(shape):
            if name.startswith("fastqt"):
                assert (shape, "low" if name.endswith("low") else "fast") in warmed


def test_a_checkout_is_enough():
    """The kernels are found beside fastqt where neither is installed."""
    program = (
        "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in str(f).lower()];"
        "import fastqt.kernels; print(list(fastqt.kernels.__path__))"
    )
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert run.stdout.strip() == str([str(ROOT / "kernels")]), run.stderr
