"""The programs for a GPU's owner, as far as they go without one: dry runs, and how failures are recorded."""

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import oracle
import pytest
import torch
from fastqt.kernels import launch, tuning
from fastqt.kernels.launch import Config
from tolerances import FLOAT64, relative

from benchmarks import gpu_check, peers, tune
from benchmarks.gpu_check import Options, Outcome, Problem, Report, Section
from benchmarks.peers import Clock, Effort, Shape

ROOT = Path(__file__).parents[2]
DRY = Options(dry_run=True)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory) -> tuple[subprocess.CompletedProcess, dict]:
    path = tmp_path_factory.mktemp("gpu_check") / "run.json"
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--dry-run", "--out", str(path)]
    without = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(command, cwd=ROOT, env=without, capture_output=True, text=True)
    assert path.exists(), run.stderr
    return run, json.loads(path.read_text())


def test_dry_run_passes_its_checks(dry_run):
    run, content = dry_run
    assert [s for s in content["sections"] if s["status"] != "done"] == []
    assert [c for c in content["checks"] if c["ok"] is False] == []
    assert run.returncode == 0
    passed = {c["section"].split(",")[0] for c in content["checks"] if c["ok"]}
    assert passed == {"cases", "accuracy", "behaviour"}
    names = {s["name"] for s in content["sections"]}
    assert names == {s.name for wave in gpu_check.waves(DRY) for s in wave}


def test_dry_run_names_the_machine_and_not_its_owner(dry_run):
    machine = dry_run[1]["machine"]
    assert machine["device"] == "interpreter"
    assert machine["torch"] == torch.__version__
    wanted = {"device", "memory_bytes", "driver", "cuda", "torch", "triton", "python", "fastqt", "date"}
    assert set(machine) == wanted
    assert str(ROOT) not in json.dumps(dry_run[1])


def test_dry_run_measures_everyone_beside_the_products(dry_run):
    rows = dry_run[1]["benchmarks"]
    for shape in peers.DRY_SHAPES:
        mine = [row for row in rows if row["shape"] == shape.name]
        assert {"GEMMs", "fastqt", "eager", "compiled", *peers.PEERS} <= {row["contestant"] for row in mine}
        losses = {row["contestant"]: row["loss"] for row in mine if not row["graphed"]}
        for name in ("fastqt", "compiled"):  # all compute one loss, eager in 16 bits
            assert losses[name] == pytest.approx(losses["eager"], rel=5e-3)
        for row in mine:
            assert (row["reason"] is None) == (row["seconds"] is not None)
            if row["seconds"] is not None:
                assert row["ratio_to_gemm"] == pytest.approx(row["seconds"] / row["gemm_seconds"])
    assert {row["graphed"] for row in rows} == {True, False}


def test_dry_run_prints_a_table(dry_run):
    run, content = dry_run
    for row in content["benchmarks"]:
        assert any(row["shape"] in line and row["contestant"] in line for line in run.stdout.splitlines())
    assert run.stdout.splitlines()[-1] == "nothing failed"


def test_everything_ends_within_8_minutes():
    for options in (Options(), Options(quick=True), DRY):
        waves = gpu_check.waves(options)
        assert sum(max(s.seconds for s in wave) + gpu_check.GRACE for wave in waves) < 480
        assert len({s.name for wave in waves for s in wave}) == sum(map(len, waves))
    within = gpu_check.find_section("sanitized", DRY).seconds + gpu_check.GRACE
    assert 3 * within <= gpu_check.find_section("sanitizer", DRY).seconds


def test_dry_run_wants_to_be_told_where_it_writes(capsys):
    for program in (gpu_check, tune):
        with pytest.raises(SystemExit, match="2"):
            program.main(["--dry-run"])
        assert "wants --out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("N", "M", "offsets", "diagonal"),
    [(9, 9, (-1, 1), "zero"), (7, 12, (0,), "keep"), (12, 7, (0, 2), "keep"), (8, 8, (1,), "zero")],
)
def test_truth_and_eager_equal_the_oracle(N, M, offsets, diagonal):
    problem = Problem("", "random", N, M, 5, offsets, diagonal)
    f, g = (x.double().requires_grad_() for x in gpu_check.random_inputs(problem, 0))
    T = oracle.window(N, M, list(offsets))
    wanted = oracle.contrastive(f.detach().numpy(), g.detach().numpy(), T, diagonal=diagonal)
    found = gpu_check.truth(f.detach(), g.detach(), offsets, diagonal)
    rows = gpu_check.eager_rows(f, g, offsets, diagonal)
    eager = (rows.detach(), *torch.autograd.grad(rows.mean(), (f, g)))
    for a, b, exact in zip(found, eager, (wanted.loss, wanted.queries, wanted.candidates), strict=True):
        assert relative(a, exact) < FLOAT64
        assert relative(b, exact) < FLOAT64


@pytest.mark.parametrize(
    "problem", [p for p in gpu_check.PROBLEMS if p.N < 2000], ids=lambda problem: problem.name
)
def test_inputs_are_as_hard_as_they_are_called(problem):
    for dtype in gpu_check.DTYPES:
        f, g = (x.to(dtype) for x in gpu_check.INPUTS[problem.kind](problem, 0))
        losses, *_ = gpu_check.truth(f, g, problem.offsets, problem.diagonal)
        gpu_check._assert_kind(problem, losses)


@pytest.mark.parametrize("kind", ["converged", "overflow"])
def test_inputs_that_are_not_hard_are_noticed(kind):
    with pytest.raises(AssertionError, match="inputs"):
        gpu_check._assert_kind(Problem("", kind, 9, 9, 5, (0,), "keep"), torch.full((9,), 2.0))


def test_an_error_beyond_its_bound_fails_and_so_does_nan():
    assert gpu_check._within({"a": (1.0, 1.0)})[0]
    assert not gpu_check._within({"a": (0.0, 1.0), "b": (1.1, 1.0)})[0]
    assert not gpu_check._within({"a": (float("nan"), 1.0)})[0]


def test_an_engine_that_is_less_exact_than_eager_fails(monkeypatch):
    problem, right = (
        Problem("", "random", 20, 20, 8, (1,), "zero", seeds=1),
        gpu_check.fastqt.contrastive_loss,
    )

    def rough(f, g, targets, *, error=0.0, backend=None, **options):
        return right(f, g, targets, **options) * (1 + error)

    for error in (0.0, 1e-4):
        monkeypatch.setattr(gpu_check.fastqt, "contrastive_loss", partial(rough, error=error))
        ok, detail = gpu_check._accuracy(problem, torch.float32, "fast", CPU)
        assert ok is (error == 0), detail


def test_a_check_records_what_was_raised():
    def refused():
        raise gpu_check.NotTakenError("backend: no")

    assert gpu_check.check("x", lambda: (True, "fine")) == {
        "kind": "check",
        "name": "x",
        "ok": True,
        "detail": "fine",
    }
    broken = gpu_check.check("x", lambda: (1 // 0, ""))
    assert broken["ok"] is False
    assert broken["detail"].startswith("ZeroDivisionError")
    assert gpu_check.check("x", refused)["ok"] is None


def test_two_results_differ_by_a_bit():
    a = [torch.zeros(3) for _ in range(3)]
    b = [*a[:2], torch.tensor([0.0, 0.0, 1e-45])]
    assert gpu_check._equal(a, a)[0]
    assert gpu_check._equal(a, b) == (False, "differ: dG")


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
def test_sanitizer_is_believed_only_if_it_worked(exit_code, output, ok):
    assert gpu_check.sanitizer_verdict(exit_code, output).ok is ok


def records_then(ending):
    def records(options):
        yield gpu_check.check("first", lambda: (True, ""))
        ending()
        yield gpu_check.check("second", lambda: (True, ""))

    return records


def fail():
    raise RuntimeError("the device is gone")


def test_a_failing_section_keeps_what_it_found(tmp_path):
    lines = tmp_path / "lines"
    with pytest.raises(RuntimeError, match="the device is gone"):
        gpu_check.write_lines(Section("s", 60, records_then(fail)), DRY, lines)
    first, end = gpu_check.read_lines(lines)
    assert first["name"] == "first"
    assert end == {"kind": "end", "status": "failed", "message": "RuntimeError: the device is gone"}


def test_a_section_stops_when_its_time_ends(tmp_path):
    lines = tmp_path / "lines"
    gpu_check.write_lines(Section("s", 0.01, records_then(partial(time.sleep, 0.02))), DRY, lines)
    names = [record.get("name", record.get("status")) for record in gpu_check.read_lines(lines)]
    assert names == ["first", "second", "out of time"]
    gpu_check.write_lines(Section("s", 0.0, records_then(fail)), DRY, lines)
    assert [r.get("name", r.get("status")) for r in gpu_check.read_lines(lines)] == ["first", "out of time"]


def test_a_line_that_is_cut_is_left_out(tmp_path):
    (tmp_path / "lines").write_text('{"kind": "end"}\n{"kind": "che')
    assert gpu_check.read_lines(tmp_path / "lines") == [{"kind": "end"}]
    assert gpu_check.read_lines(tmp_path / "none") == []


def test_a_section_that_hangs_is_ended(monkeypatch):
    monkeypatch.setattr(gpu_check, "GRACE", 0.0)
    outcome = gpu_check.run_section(Section("machine", 0.05, gpu_check.machine), DRY)
    assert (outcome.status, outcome.exit_code) == ("failed", None)
    assert "did not end" in outcome.message


def test_a_section_that_dies_is_failed():
    outcome = gpu_check.run_section(Section("no such section", 60, fail), DRY)
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


def test_report_fails_with_a_section_and_not_with_the_clock():
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


def absent(inputs):
    raise ModuleNotFoundError("No module named 'absent'")


def breaks_at(call):
    """A contestant that works until its `call`-th step."""

    def make(inputs):
        calls = iter(range(call))

        def step(i):
            if next(calls, None) is None:
                raise torch.OutOfMemoryError("out of memory\nwith details")
            return [torch.tensor(1.0)]

        return step

    return make


def test_whoever_fails_gets_a_reason_and_the_others_go_on():
    inputs = peers.make_inputs(Shape(6, 6, 4), torch.float32, CPU)
    entrants = {"absent": absent, "at once": breaks_at(0), "later": breaks_at(4), "eager": peers.eager}
    results = peers.in_turns(entrants, inputs, Clock(CPU), Effort(1, 5, 0.0))
    assert results["absent"].reason == "ModuleNotFoundError: No module named 'absent'"
    assert results["at once"].reason == results["later"].reason == "OutOfMemoryError: out of memory"
    assert all(results[name].seconds is None for name in ("absent", "at once", "later"))
    assert results["eager"].reason is None
    assert results["eager"].rounds == 5
    f, g = (x.detach() for x in inputs.sets[0])
    assert results["eager"].loss == pytest.approx(float(peers.cross_entropy(f, g, inputs.labels)))


def test_a_step_of_several_sets_is_divided_by_them():
    inputs = peers.make_inputs(Shape(4, 4, 4), torch.float32, CPU)
    seconds = iter([8.0, 4.0, 6.0])
    clock = SimpleNamespace(device=CPU, seconds=lambda function: next(seconds), free=lambda: None)
    entrants = {"eager": peers.in_graph(peers.eager)}
    result = peers.in_turns(entrants, inputs, clock, Effort(1, 3, 0.0), sets_a_step=2)["eager"]
    assert result.seconds == 3.0
    assert result.peak_bytes is None


def test_products_are_those_of_the_loss():
    inputs = peers.make_inputs(Shape(5, 7, 3), torch.float32, CPU)
    seen = []
    step = peers.products(inputs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "mm", lambda a, b, out: seen.append((*a.shape, b.shape[1])))
        step(0)
    assert seen == [(5, 3, 7), (5, 7, 3), (7, 5, 3)]


def test_inputs_rotate_and_are_labelled_within_the_candidates():
    inputs = peers.make_inputs(Shape(5, 9, 4), torch.bfloat16, CPU)
    assert len(inputs.sets) == 2
    assert inputs[0][0] is inputs[2][0] is not inputs[1][0]
    assert (inputs.labels >= 0).all()
    assert (inputs.labels < 9).all()
    square = peers.make_inputs(Shape(5, 5, 4), torch.bfloat16, CPU)
    assert square.labels.tolist() == list(range(5))


def test_a_prediction_stands_beside_its_measurement(monkeypatch):
    shape = Shape(4, 4, 4)
    monkeypatch.setattr(peers, "PREDICTIONS", {(shape, "eager"): 2.5})
    rows = peers.measure(shape, {"eager": peers.eager}, torch.float32, CPU, Effort(1, 1, 0.0))
    assert {row["contestant"]: row["predicted_ratio"] for row in rows} == {"GEMMs": None, "eager": 2.5}
    assert "2.50" in peers.cells(rows[1])


@pytest.fixture
def tuned(tmp_path, monkeypatch):
    """The folder of tables, as kernels/tuned, and what reads it as if a GPU were there."""
    folder = tmp_path / "tuned"
    monkeypatch.setattr(tuning, "resources", SimpleNamespace(files=lambda package: tmp_path))
    monkeypatch.setattr(tuning, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "interpreter")
    tuning.tables.cache_clear()
    yield folder
    tuning.tables.cache_clear()


def test_tuned_table_is_read_back(tuned, capsys):
    assert tune.main(["--dry-run", "--dtype", "float32", "--out", str(tuned)]) == 0
    first, second = json.loads((tuned / "interpreter.json").read_text())["scores"]["float32"]
    gpu = torch.device("cuda")
    for N, D, entry in ((10, 8, first), (16, 8, first), (17, 8, second), (4096, 768, second)):
        found = tuning.score_config(gpu, torch.float32, N, N, D)
        assert found == Config(**entry["config"])
        assert found in {Config(16, columns, 16, group, 4, 2) for columns in (16, 32) for group in (2, 1)}
    assert "2 of 2 entries" in capsys.readouterr().out


def test_tables_of_other_dtypes_stay(tuned):
    for dtype in ("float32", "float16"):
        tune.write_table(tuned / "x.json", "interpreter", dtype, [{"most_scores": 1}])
    assert set(tuning.tables()["interpreter"]) == {"float32", "float16"}


def test_every_problem_has_a_tile_once_all_cells_are_measured():
    *_, last = tune.PLAN.cells
    assert last.most_scores >= 2**40
    assert last.most_width >= 2**20
    for cell in tune.PLAN.cells:  # and each shape reaches its own entry first
        N, M, D = asdict(cell.shape).values()
        covering = [c for c in tune.PLAN.cells if c.most_scores >= N * M and c.most_width >= D]
        assert covering[0] is cell


def test_configs_fit_the_device():
    hopper = 232_448
    configs = tune.PLAN.space.configs(2, hopper)
    assert len(configs) == len(set(configs)) > 50
    for config in configs:
        assert (config.rows + config.columns) * config.width * 2 * config.stages <= hopper
        assert config.rows * config.columns <= 128 * 32 * config.warps
    assert tuning.DEFAULT[torch.bfloat16] in configs
    assert len(tune.PLAN.space.configs(2, hopper // 2)) < len(configs)
    assert set(tune.PLAN.space.configs(4, hopper)) < set(configs)


class FakeScores:
    """Takes as long as `seconds` says, and computes nonsense with tiles of 64 rows."""

    def __init__(self, seconds):
        self.seconds = seconds

    def is_right(self, config):
        if config.stages == 5:
            raise RuntimeError("out of resource: shared memory")
        return config.rows != 64

    def launch(self, config, i):
        self.config = config


class FakeClock:
    def __init__(self, scores):
        self.scores = scores

    def seconds(self, function):
        function()
        return self.scores.seconds(self.scores.config)


def test_tune_finds_the_fastest_that_is_right(capsys):
    best = Config(rows=128, columns=64, width=32, group=16, warps=4, stages=2)

    def seconds(config):
        differences = sum(a != b for a, b in zip(asdict(config).values(), asdict(best).values(), strict=True))
        return 0.1 if config.rows == 64 or config.stages == 5 else 1.0 + differences

    scores = FakeScores(seconds)
    found = tune.tune(scores, tune.PLAN, 2, 232_448, FakeClock(scores), time.monotonic() + 60)
    assert found.config == best
    assert found.tried == len(tune.PLAN.space.configs(2, 232_448))
    assert 0 < found.dropped < found.tried
    assert "out of resource" in capsys.readouterr().err


def test_tune_gives_a_result_even_if_time_is_up():
    scores = FakeScores(lambda config: 1.0)
    found = tune.tune(scores, tune.PLAN, 2, 232_448, FakeClock(scores), time.monotonic() - 1)
    assert found.tried < 10
    assert found.config.rows != 64


def test_scores_notice_what_is_wrong(monkeypatch):
    scores = tune.Scores(Shape(10, 12, 8), torch.float32, CPU)
    config = Config(rows=16, columns=16, width=16, group=2)
    assert launch.INTERPRETED
    assert scores.is_right(config)
    right = scores.launch
    monkeypatch.setattr(scores, "launch", lambda config, i: right(config, i) * 1.01)
    assert not scores.is_right(config)
