"""The display of a training, with and without a terminal, and the signals that stop it."""

import io
import os
import signal
import threading

import pytest

from fastqt.sentences.train.progress import Display, StopRequest

LINE = {
    "step": 50,
    "loss": 2.5,
    "forward_accuracy": 0.25,
    "backward_accuracy": 0.125,
    "chance": 0.01,
    "sentences_per_second": 200.0,
    "seconds": 5.0,
}
VALIDATION = {
    "validation_loss": 3.5,
    "validation_forward_accuracy": 0.0625,
    "validation_backward_accuracy": 0.5,
}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_without_a_terminal_each_report_is_one_line(capsys):
    Display.note("reading")
    with Display(total=3000, done=500) as display:
        display.advance(500)
        display.report(LINE)
        display.advance(2000)
        display.report(LINE | {"step": 100} | VALIDATION)
    assert capsys.readouterr().err.splitlines() == [
        "step 50 loss 2.500 forward 0.250 backward 0.125 chance 0.0100 | 200 sentences/s, 00:10 left",
        "step 100 loss 2.500 forward 0.250 backward 0.125 chance 0.0100 | held out: loss 3.500 forward 0.062 "
        "backward 0.500 | 200 sentences/s, 00:00 left",
    ]


def test_a_terminal_shows_a_progress_bar(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("COLUMNS", "200")
    Display.note("reading")
    with Display(total=3000, done=500) as display:
        display.report(LINE)
        display.advance(1000)
    assert terminal.getvalue().startswith("reading\n")
    last = terminal.getvalue().split("\r")[-1]
    assert "50%" in last
    assert "1.50k/3.00k" in last
    assert "sent/s" in last
    assert "loss 2.500 forward 0.250 backward 0.125 chance 0.0100" in last


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
