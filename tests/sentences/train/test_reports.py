"""What a training tells: before its first step, in its display and its log; and the signals that stop it."""

import io
import math
import os
import signal
import threading

import pytest
import torch

from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.runs.metrics_file import MetricsLog, read_metrics
from fastqt.sentences.runs.progress import Progress
from fastqt.sentences.train import loop, train
from fastqt.sentences.train import progress as clock
from fastqt.sentences.train.interval import Interval
from fastqt.sentences.train.progress import Display, Moment, StopRequest
from tests.shared.trainings import assert_same_weights, lines_of, metrics, trainer_of

SMALL = {"word_dim": 6, "batch_size": 48, "context_size": 1, "device": "cpu"}
LINE = {"step": 50, "loss": 2.5, "forward_accuracy": 0.25, "backward_accuracy": 0.125, "chance": 0.01}
LINE |= {"sentences_per_second": 200.0, "seconds": 5.0}


@pytest.fixture
def said(monkeypatch):
    """The lines that a training tells, by their first words."""
    lines = []
    monkeypatch.setattr(Display, "say", staticmethod(lambda text: lines.extend(text.splitlines())))
    return lines


def test_it_tells_what_it_has_read(planted, tmp_path, said):
    config = TrainConfig((planted[0],), valid=planted[1], **SMALL, epochs=2, vocab_size=20)
    train(config, tmp_path)
    told = dict(line.split(maxsplit=1) for line in said)
    with open(planted[0]) as file:
        words = [word for line in file for word in line.split()]
    assert told["corpus"].startswith(f"{planted[0]}: 480 sentences, {len(words):,} words, ")
    assert 0 < float(told["corpus"].split(", ")[-1].split("%")[0]) < 100
    assert told["vocabulary"] == "20 entries"
    assert told["model"] == "quickthoughts, encoder bow: 240 parameters"  # two tables of 20 x 6
    assert told["device"].startswith("cpu, ")
    assert told["training"] == "10 batches an epoch, of 48 sentences; up to step 20"
    assert said[-1] == f"held out    {planted[1]}: 2 batches"


def test_a_resumed_training_tells_where_it_goes_on(planted, tmp_path, said):
    config = TrainConfig((planted[0],), **SMALL, steps=3, keep_checkpoint=True)
    train(config, tmp_path)
    said.clear()
    train(TrainConfig((planted[0],), **SMALL), tmp_path, resume=True)
    assert "training    10 batches an epoch, of 48 sentences; up to step 10, from step 3" in said
    assert f"corpus      {planted[0]}: 480 sentences" in said  # the words are not counted again
    said.clear()
    train(TrainConfig((planted[0],), **SMALL), tmp_path, resume=True)
    assert said == []  # nothing is left to do


@pytest.mark.parametrize(("seconds", "steps"), [(0.0, [1, 10]), (1e9, [10])])
def test_the_first_report_does_not_wait_for_its_turn(planted, tmp_path, monkeypatch, seconds, steps):
    """It comes after some seconds of work. It is shown and not stored, because it depends on the machine."""
    shown = []

    class Recorder(Display):
        def report(self, line):
            shown.append(line["step"])

    monkeypatch.setattr(loop, "FIRST_REPORT", seconds)
    config = TrainConfig((planted[0],), **SMALL, report_every=1000)
    train(config, tmp_path, display=Recorder)
    assert shown == steps
    assert [line["step"] for line in lines_of(tmp_path)] == [10]


@pytest.mark.parametrize(
    ("settings", "steps"), [({"model": "simcse"}, [0, 5, 10]), ({"model": "gloss-bow"}, [5, 10])], ids=str
)
def test_the_first_line_is_of_fresh_weights(planted, tmp_path, settings, steps):
    """The validation before the first step changes nothing of what is learnt."""
    settings = SMALL | settings | {"epochs": 1, "report_every": 100, "valid_every": 5, "valid_batches": 1}
    for name, valid in (("with", planted[1]), ("without", None)):
        train(TrainConfig((planted[0],), valid=valid, **settings), tmp_path / name)
    lines = lines_of(tmp_path / "with")
    assert [line["step"] for line in lines] == steps
    assert all("validation_loss" in line for line in lines)
    if steps[0] == 0:
        assert_same_weights(tmp_path / "with", tmp_path / "without")
        assert "loss" not in lines[0]


@pytest.mark.parametrize("report_every", [4, 5, 20])
def test_a_report_is_of_all_rows_since_the_last_one(planted, tmp_path, report_every):
    """The last batch, of 12 rows and not 52, counts by its rows; alone it does not make a report."""
    config = TrainConfig((planted[0],), **SMALL | {"batch_size": 52}, report_every=report_every)
    train(config, tmp_path / "run")
    trainer = trainer_of(config, tmp_path, Progress(sentences=480))
    steps = []
    for turn in trainer.objective.turns(Progress(sentences=480)):
        loss, measured = trainer.step(turn.batch, turn.sizes)
        steps.append((sum(turn.sizes), {"loss": loss.item(), **trainer.objective.measure(measured)}))
    assert [rows for rows, _ in steps] == [*[52] * 9, 12]

    # Without the loss, of 20 steps those at equal distances and the last are measured: 4, 8 and 10.
    wanted = {
        4: {4: [1, 2, 3, 4], 8: [5, 6, 7, 8], 10: [9, 10]},
        5: {5: [1, 2, 3, 4, 5], 10: [6, 7, 8, 9, 10]},
        20: {10: [4, 8, 10]},
    }[report_every]
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == list(wanted)
    for line in lines:
        for name in steps[0][1]:
            numbers = range(1, 11) if name == "loss" and report_every == 20 else wanted[line["step"]]
            chosen = [steps[number - 1] for number in numbers]
            mean = sum(rows * figures[name] for rows, figures in chosen) / sum(rows for rows, _ in chosen)
            assert line[name] == pytest.approx(mean, rel=1e-6), name


def test_a_short_batch_is_reported_with_the_rows_before_it(planted, tmp_path):
    """Alone it has another chance and a lower loss, as fewer candidates have."""
    settings = SMALL | {"batch_size": 52, "report_every": 3}
    train(TrainConfig((planted[0],), **settings), tmp_path)
    lines = metrics(tmp_path)
    assert [line["step"] for line in lines] == [3, 6, 9, 10]
    assert lines[-1]["chance"] == pytest.approx((3 * 52 / 52 + 12 / 12) / (3 * 52 + 12))


def test_times_are_those_of_the_two_clocks_and_are_added(monkeypatch):
    readings = iter([100.0, 107.0])
    monkeypatch.setattr(clock.time, "perf_counter", lambda: next(readings))
    monkeypatch.setattr(clock.time, "process_time", lambda: 3.5)
    earlier, later = Moment.now(), Moment.now()
    progress = Progress(seconds=10.0, cpu_seconds=1.0)
    later._replace(cpu_seconds=5.5).since(earlier).add_to(progress)
    assert (progress.seconds, progress.cpu_seconds) == (17.0, 3.0)


def test_without_a_terminal_each_report_is_one_line(capsys):
    Display.note("reading")
    with Display(total=3000, done=500) as display:
        display.advance(500)
        display.report(LINE)
        display.advance(2000)
        held_out = {"loss": 3.5, "forward_accuracy": 0.0625, "backward_accuracy": 0.5}
        display.report(LINE | {"step": 100} | {f"validation_{name}": held_out[name] for name in held_out})
    assert capsys.readouterr().err.splitlines() == [
        "step 50 loss 2.500 forward 25.0% backward 12.5% chance 1.00% | 200 sentences/s, 00:10 left",
        "step 100 loss 2.500 forward 25.0% backward 12.5% chance 1.00% | held out: loss 3.500 forward 6.2% "
        "backward 50.0% | 200 sentences/s, 00:00 left",
    ]


def test_a_terminal_shows_the_reports_above_a_bar(monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("COLUMNS", "200")
    Display.note("reading")
    with Display(total=3000, done=500) as display:
        display.report(LINE)
        display.advance(1000)
        display.report(LINE | {"step": 100})
    assert terminal.getvalue().startswith("reading\n")
    *history, last = terminal.getvalue().split("\r")
    reports = [text.splitlines()[0] for text in history if text.startswith("step")]
    figures = "loss 2.500 forward 25.0% backward 12.5% chance 1.00%"
    assert [text.split(" |")[0] for text in reports] == [f"step {step} {figures}" for step in (50, 100)]
    for part in ("50%", "1.50k/3.00k", "sent/s"):
        assert part in last


@pytest.mark.parametrize("columns", [80, 120, 200])
def test_a_report_is_not_wider_than_the_terminal(monkeypatch, columns):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("COLUMNS", str(columns))
    with Display(total=3000, done=500) as display:
        display.report(LINE | {"validation_loss": 3.5, "validation_forward_accuracy": 0.0625})
    lines = next(text for text in terminal.getvalue().split("\r") if text.startswith("step")).splitlines()
    assert max(map(len, lines)) <= columns
    assert "held out: loss 3.500 forward 6.2%" in " ".join(lines)
    assert (lines[0] == "step 50 loss 2.500 forward 25.0% backward 12.5% chance 1.00%") == (columns == 80)


def test_a_training_goes_on_if_nobody_reads_its_reports(monkeypatch):
    """As after `fastqt train … 2>&1 | head`."""
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w", buffering=1) as broken:
        monkeypatch.setattr("sys.stderr", broken)
        display = Display(total=3000, done=500)
        display.report(LINE)
        display.report(LINE)
        monkeypatch.undo()
        with open(os.devnull, "wb") as null:  # for what `broken` still holds when it is closed
            os.dup2(null.fileno(), writing)


def test_a_second_ctrl_c_interrupts_at_once():
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.signal == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_no_signal_handlers_are_set_outside_the_main_thread():
    handler, seen = signal.getsignal(signal.SIGTERM), []

    def enter():
        with StopRequest() as stop:
            seen.append((signal.getsignal(signal.SIGTERM), stop.signal))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [(handler, None)]


def test_a_log_that_lost_lines_goes_on(tmp_path, capsys):
    """It only tells of a training, which nobody could continue otherwise."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st')
    log = MetricsLog(path, 99)
    log.write({"step": 2})
    assert log.sync() == path.stat().st_size
    path.unlink()  # while the training runs
    log.write({"step": 3})
    log.close()
    assert [line["step"] for line in read_metrics(path)] == [3]
    warnings = capsys.readouterr().err.splitlines()
    assert [line.split("metrics.jsonl ")[1] for line in warnings] == [
        "has lost lines: it has 16 bytes of 99",
        "has lost lines: it has 0 bytes of 29",
    ]


def test_lines_that_cannot_be_written_are_written_later(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.write({"step": 1})
    path.rename(tmp_path / "elsewhere")
    path.mkdir()
    for step in (2, 3):
        log.write({"step": step})
    assert log.sync() == len('{"step": 1}\n') * 3
    path.rmdir()
    (tmp_path / "elsewhere").rename(path)
    log.close()
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3]
    warning = f"fastqt: warning: {path} cannot be written: Is a directory; the training goes on\n"
    assert capsys.readouterr().err == warning


def test_a_loss_that_is_not_finite_does_not_count_in_the_mean():
    """float16 has overflowed, and there was no step."""
    interval = Interval(Progress(step=1), report_every=10, batch=4)
    for loss, rows in ((2.0, 4), (math.inf, 4), (math.nan, 4), (5.0, 2)):
        interval.add(torch.tensor(loss), rows, dict)
    assert interval.means() == {"loss": 3.0}
