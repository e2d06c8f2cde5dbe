"""The contestants train the same model, and a table has the figures of the run."""

import random
import subprocess
import sys

import pytest

from benchmarks import static_trainer
from benchmarks.static_trainer import (
    ACCELERATED,
    COMMAND,
    CONTESTANTS,
    LOSSES,
    NO_RUN,
    THEIRS,
    Case,
    Stopwatch,
)

for name in ("sentence_transformers", "accelerate", "datasets"):
    pytest.importorskip(name, reason="the extra st is not installed")

WIDTHS = (8, 4)
TINY = Case(8, False, steps=3, rounds=1)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(1, 5))) for _ in range(200)]
    sentences = (" ".join(draw.choices(words, k=draw.randint(3, 9))) + "\n" for _ in range(60))
    folder = tmp_path_factory.mktemp("data")
    static_trainer.write_data(folder, sentences, TINY.rows, vocabulary=80)
    return folder


def test_trainings_in_their_trainer_have_one_curve(data):
    """On other batches than those of the command, whose loss is of the same size."""
    theirs, ours, accelerated, command = (
        static_trainer.training(name, TINY, data, WIDTHS) for name in (THEIRS, LOSSES, ACCELERATED, COMMAND)
    )
    assert len(theirs[1]) == TINY.steps
    assert ours[1] == pytest.approx(theirs[1], rel=1e-4)
    assert accelerated[1] == pytest.approx(theirs[1], rel=1e-4)
    assert 0.2 * theirs[1][-1] < command[1][-1] < 5 * theirs[1][-1]
    for figures, _ in (theirs, ours):
        assert figures["before"] == 0 < figures["tokenising"] < figures["seconds"]
    for figures, _ in (accelerated, command):
        assert figures["before"] > 0 < figures["seconds"]


def test_times_and_peaks_are_of_all_contestants(data):
    assert static_trainer.times(TINY, data, WIDTHS).keys() == {*CONTESTANTS}
    command = [sys.executable, "-m", "benchmarks.static_trainer", "--peak", COMMAND, "8", str(data)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert 1 << 26 < int(done.stdout) < 1 << 34


def test_a_corpus_of_too_few_pairs_is_refused(data):
    with pytest.raises(SystemExit, match="the corpus: want 8,000 pairs of consecutive sentences, got 24"):
        static_trainer.training(THEIRS, Case(1000, False, 8, 1), data, WIDTHS)


def test_a_step_is_between_two_ends(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def tokenise(seconds):
        now[0] += seconds

    watch = Stopwatch()
    for seconds in (5.0, 0.5, 0.25):
        watch.timed(tokenise)(seconds)
        now[0] += 1.0
        watch.end_step()
    figures = watch.figures(30.0, Case(10, False, steps=3, rounds=1))
    assert figures == {"seconds": (1.5 + 1.25) / 2, "tokenising": 0.375, "before": 10.0}


def test_tables_have_the_figures_of_the_runs():
    figures = {"seconds": 0.9, "tokenising": 0.15, "before": 0.0}
    ours = {"seconds": 0.2, "tokenising": 0.0, "before": 0.1}
    case = {"batch": 2048, "bf16": True, "steps": 8, "rounds": 3}
    info = {
        "cpu": "a processor",
        "threads": 2,
        "system": "Linux",
        "python_version": "3",
        "torch_version": "2",
    }
    about = {"machine_info": info, "versions": {"tokenizers": "1"}, "datetime": "2026-01-01", "disturbed": []}
    peaks = {name: (number + 1) << 30 for number, name in enumerate(CONTESTANTS)}
    runs = {
        "2048-bf16": {**about, "case": case, "found": {THEIRS: figures, COMMAND: ours}},
        "memory": {**about, "disturbed": ["noise"], "found": {"2048": peaks}},
    }
    last = static_trainer.times_table(runs).splitlines()[-1]
    assert last == "| 2,048 | bfloat16 | `fastqt train` | 0.200 | 0.000 | 0.100 | 0.300 | 3.00 × |"
    assert static_trainer.memory_table(runs).splitlines()[-1] == "| 2,048 | 1,024 | 2,048 | 3,072 | 4,096 |"
    line = "Measured on: a processor, 2 threads, Linux, Python 3, torch 2, 2026-01-01, tokenizers 1."
    assert static_trainer.machine_line(runs) == f"{line} The machine was not quiet: noise."


def test_what_is_not_measured_yet_is_told():
    shown = (static_trainer.times_table, static_trainer.memory_table, static_trainer.machine_line)
    assert [show({}) for show in shown] == [NO_RUN] * 3
