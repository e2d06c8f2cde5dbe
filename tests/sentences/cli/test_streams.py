"""Standard streams that are closed, full or of another encoding: a line and a status, and no traceback."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fastqt
from fastqt.sentences.cli import main

FASTQT = f"{sys.executable} -m fastqt"
TO_STDOUT = "cannot write to standard output"
FULL = pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full exists on Linux only")
BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


def shell(command: str) -> subprocess.CompletedProcess:
    """Runs a command that needs no torch; {} stands for fastqt."""
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command.format(FASTQT)}"],
        capture_output=True,
        text=True,
        env=BUFFERED,
        timeout=120,
    )


@pytest.mark.parametrize(
    ("command", "message"),
    [
        pytest.param("{} --help >/dev/full", f"{TO_STDOUT}: No space left on device", marks=FULL),
        pytest.param("{} --version >/dev/full", f"{TO_STDOUT}: No space left on device", marks=FULL),
        ("{} train --help | true", f"{TO_STDOUT}: Broken pipe"),
        ("{} --version >&-", f"{TO_STDOUT}: it is closed"),
        ("{} embed x y --out z <&- >&-", f"{TO_STDOUT}: it is closed"),
        ("{} fly 2>&1 >&- <&-", None),
        ("{} fly 2>&-", None),
        pytest.param("{} fly 2>/dev/full", None, marks=FULL),
    ],
)
def test_a_stream_that_cannot_be_written(command, message):
    done = shell(command)
    assert done.returncode == 2
    assert done.stderr == ("" if message is None else f"fastqt: {message}\n")
    assert "Traceback" not in done.stdout


def test_the_help_text_in_another_encoding():
    """It holds an ellipsis, which latin-1 does not have."""
    done = shell("PYTHONIOENCODING=latin-1 {} evaluate --help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "MR,CR,\\u2026" in done.stdout


def test_results_in_another_encoding_are_escaped(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "latin-1"))
    monkeypatch.setattr("fastqt.engines.show_config", lambda: print("gr\u00fcn \u56db"))
    assert main(["config"]) == 0
    assert written.getvalue() == b"gr\xfcn \\u56db\n"


@FULL
def test_results_that_cannot_be_written(monkeypatch, capsys):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["config"]) == 2
    assert capsys.readouterr().err == f"fastqt: {TO_STDOUT}: No space left on device\n"


def test_a_file_does_not_get_the_number_of_a_closed_stream(tmp_path):
    """Otherwise what libraries print on standard error would be written to the file."""
    program = (
        "import os, sys\n"
        "from fastqt.sentences.cli import main\n"
        "try:\n"
        "    main(['--version'])\n"
        "except SystemExit:\n"
        "    pass\n"
        "with open('x', 'w') as file:\n"
        "    os.write(2, b'a warning')\n"
        "    file.write(str(file.fileno() > 2))\n"
    )
    subprocess.run(
        ["bash", "-c", f'{sys.executable} -c "$1" <&- 2>&-', "-", program], cwd=tmp_path, check=True
    )
    assert (tmp_path / "x").read_text() == "True"


def test_no_memory_is_reported_with_the_size(monkeypatch, capsys):
    for error, message in (
        (MemoryError(), "not enough memory"),
        (MemoryError("Unable to allocate 7 TiB for an array"), "Unable to allocate 7 TiB for an array"),
        (RuntimeError("DefaultCPUAllocator: you tried to allocate 3600 bytes. Error"), "for 3600 bytes"),
    ):

        def fail(error=error):
            raise error

        monkeypatch.setattr("fastqt.engines.show_config", fail)
        assert main(["config"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("fastqt: not enough memory")
        assert line.endswith(message)


def test_a_defect_keeps_its_traceback(monkeypatch):
    def fail():
        raise RuntimeError("a defect")

    monkeypatch.setattr("fastqt.engines.show_config", fail)
    with pytest.raises(RuntimeError, match="a defect"):
        main(["config"])


def test_python_m_fastqt_is_the_command():
    done = shell("{} --version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"fastqt {fastqt.__version__}\n", "")
