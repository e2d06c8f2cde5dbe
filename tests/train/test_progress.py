"""What a training prints on a terminal and elsewhere, and how a signal stops it."""

import io
import os
import signal
import threading

import pytest

from fastqt.train.progress import Display, StopRequest

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


def test_elsewhere_a_report_is_a_line(capsys):
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


def test_on_a_terminal_there_is_a_bar(monkeypatch):
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


def test_the_second_interrupt_does_not_wait():
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.signal == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_other_threads_set_no_handlers():
    handler, seen = signal.getsignal(signal.SIGTERM), []

    def enter():
        with StopRequest() as stop:
            seen.append((signal.getsignal(signal.SIGTERM), stop.signal))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [(handler, None)]
