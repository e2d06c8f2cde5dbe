"""How tiles are chosen for a GPU, tested without one: in Triton's interpreter, and on invented times."""

import json
import statistics
import time
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu import tune, tune_scores
from benchmarks.gpu.peers import Shape
from fastqt.devices import known_properties
from fastqt.kernels import launch, tuning
from fastqt.kernels.launch import Config

CPU = torch.device("cpu")


@pytest.fixture
def tuned(tmp_path, monkeypatch):
    """A folder in place of kernels/tuned; its reader believes that a GPU is there."""
    folder = tmp_path / "tuned"
    folder.mkdir()
    monkeypatch.setattr(tuning, "resources", SimpleNamespace(files=lambda package: folder))
    monkeypatch.setattr(tuning, "INTERPRETED", False)
    gpu = SimpleNamespace(name="interpreter", major=9, multi_processor_count=132)
    gpu.shared_memory_per_block_optin = 227 * 1024
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    for cached in (tuning.tables, known_properties):
        cached.cache_clear()
    yield folder
    for cached in (tuning.tables, known_properties):
        cached.cache_clear()


@pytest.mark.slow
def test_tuned_table_is_read_back(tuned, capsys):
    assert tune.main(["--dry-run", "--dtype", "float32", "--out", str(tuned)]) == 0
    first, second, *others = json.loads((tuned / "interpreter.json").read_text())["scores"]["float32"]
    gpu = torch.device("cuda")
    for N, D, entry in ((10, 8, first), (16, 8, first), (17, 8, second), (4096, 768, second)):
        found = tuning.score_config(gpu, torch.float32, N, N, D)
        assert found == Config(**entry["config"])
        assert found in {Config(16, columns, 16, group, 4, 2) for columns in (16, 32) for group in (2, 1)}
    flags = {"few_columns": True}, {"heavy": True, "few_columns": True}, {"heavy": True, "wide": True}
    assert [entry["epilogue"] for entry in others] == list(tuning.EPILOGUES[1:])
    for epilogue, entry in zip(flags, others, strict=True):
        assert tuning.score_config(gpu, torch.float32, 99, 99, 8, **epilogue) == Config(**entry["config"])
    assert "5 of 5 entries" in capsys.readouterr().out


def test_an_entry_holds_for_its_epilogue_alone(tuned):
    """One without a name is of a table from before there were others than plain exponentials."""
    gpu, shape = torch.device("cuda"), (torch.bfloat16, 8192, 8192, 768)
    entries = [
        {"most_scores": tune.ANY, "most_width": tune.ANY, "config": {"rows": rows}, **named}
        for rows, named in ((1, {}), (2, {"epilogue": "heavy"}))
    ]
    tune.write_table(tuned / "x.json", "interpreter", "bfloat16", entries)
    assert tuning.score_config(gpu, *shape) == Config(rows=1)
    assert tuning.score_config(gpu, *shape, heavy=True) == Config(rows=2)
    assert tuning.score_config(gpu, *shape, heavy=True, few_columns=True) == Config(rows=2)
    assert tuning.score_config(gpu, *shape, few_columns=True) == tuning.HOPPER_TALL
    assert tuning.score_config(gpu, *shape, heavy=True, wide=True) == tuning.DEFAULT[torch.bfloat16]


def test_every_problem_has_a_tile_once_all_cells_are_measured():
    for epilogue in tuning.EPILOGUES:
        cells = [cell for cell in tune.PLAN.cells if cell.epilogue == epilogue]
        assert cells[-1].most_scores >= 2**40
        assert cells[-1].most_width >= 2**20
        for cell in cells:  # and each shape reaches its own entry first
            N, M, D = asdict(cell.shape).values()
            covering = [c for c in cells if c.most_scores >= N * M and c.most_width >= D]
            assert covering[0] is cell


class FakeScores:
    """Takes as long as `seconds` says, and computes wrong sums with tiles of 64 rows."""

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
    found = tune.tune(
        scores, tune.PLAN, tune.PLAN.cells[0], 2, 232_448, FakeClock(scores), time.monotonic() + 60
    )
    assert found.config == best
    assert found.tried == len(tune.PLAN.space.configs(2, 232_448))
    assert 0 < found.dropped < found.tried
    assert "out of resource" in capsys.readouterr().err


@pytest.mark.parametrize("space", [tune.PLAN.space, tune.PLAN.other_space], ids=["plain", "others"])
def test_the_likeliest_tiles_are_tried_first(space):
    """Time may run out, so that the engine's own come first, and then those with one number of others."""
    first, *_ = configs = space.configs(2, 232_448)
    likely = [asdict(x) for x in (tuning.HOPPER, tuning.HOPPER_TALL, *tuning.DEFAULT.values())]

    def others(config):
        numbers = asdict(config)
        return min(sum(numbers[name] != value for name, value in of.items()) for of in likely)

    distances = [others(config) for config in configs]
    assert distances[0] == 0
    assert max(distances[:12]) <= 1
    assert statistics.mean(distances[:30]) < statistics.mean(distances[30:]) - 1
    assert first.rows * first.columns == 2**15


@pytest.mark.parametrize("epilogue", tuning.EPILOGUES)
def test_wrong_sums_and_cells_are_noticed(monkeypatch, epilogue):
    monkeypatch.setattr(tune_scores, "CHECKED_ROWS", 4)
    scores = tune.Scores(Shape(20, 24, 8), torch.float32, CPU, epilogue)
    config = Config(rows=16, columns=16, width=16, group=2)
    assert launch.INTERPRETED
    assert scores.is_right(config)
    right = scores.launch
    monkeypatch.setattr(scores, "launch", lambda config, i: right(config, i) * 1.01)
    assert not scores.is_right(config)
    for row in (0, 19):

        def with_a_wrong_cell(config, i, row=row):
            sums = right(config, i)
            scores.stored[row, 23] *= 1.02
            return sums

        monkeypatch.setattr(scores, "launch", with_a_wrong_cell)
        assert not scores.is_right(config)
