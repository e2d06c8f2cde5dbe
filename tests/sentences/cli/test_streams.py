"""Standard streams that are closed, full or of another encoding: a line and a status, and no traceback."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fastqt
from fastqt.sentences.cli import main
from tests.shared.command_lines import SMALL

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


@pytest.mark.parametrize(
    ("encoding", "errors", "written"),
    [
        ("latin-1", "strict", b"gr\xfcn \\u56db"),
        ("ascii", "surrogateescape", rb"gr\xfcn \u56db"),  # with LC_ALL=C, where Python has no UTF-8 mode
        ("utf-8", "surrogateescape", "gr\u00fcn \u56db".encode()),
        ("ascii", "replace", b"gr?n ?"),  # as a user has chosen
    ],
)
def test_results_in_another_encoding_are_escaped(monkeypatch, encoding, errors, written):
    stream = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(stream, encoding, errors))
    monkeypatch.setattr("fastqt.engines.show_config", lambda: print("gr\u00fcn \u56db"))
    assert main(["config"]) == 0
    assert stream.getvalue() == written + b"\n"


@pytest.mark.slow
def test_names_and_texts_that_the_locale_does_not_have(planted, tmp_path):
    """Trained, searched, plotted and exported in a process whose encoding is ASCII."""
    program = f"""
import sys
from fastqt.sentences.cli import main
corpus, run, out = sys.argv[1:]
assert main(["train", corpus, "--out", run, *{SMALL}]) == 0
assert main(["neighbors", run, corpus, "--query", "place1", "-k", "1"]) == 0
assert main(["export", run, "--out", out, "--format", "sentence-transformers"]) == 0
sys.exit(main(["export", run, "--out", out + "x", "--format", "onnx"]))
"""
    corpus = tmp_path / "caf\u00e9.txt"
    corpus.write_text(Path(planted[0]).read_text().replace("place", "\u56db place"), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", program, corpus, "r\u00e4n", "\u00f6ut"],
        capture_output=True,
        cwd=tmp_path,
        env={**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    )
    assert b"Traceback" not in done.stderr, done.stderr.decode()
    assert done.returncode == 2
    assert b"fastqt: out: want a path in UTF-8" in done.stderr
    assert rb"\u56db place" in done.stdout
    assert "caf" in (tmp_path / "\u00f6ut" / "README.md").read_text(encoding="utf-8")


@FULL
def test_results_that_cannot_be_written(monkeypatch, capsys):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["config"]) == 2
    assert capsys.readouterr().err == f"fastqt: {TO_STDOUT}: No space left on device\n"


@FULL
def test_a_summary_that_nobody_reads_does_not_end_a_training(planted, tmp_path):
    options = "--word-dim 4 --batch-size 40 --context-size 1 --steps 1"
    done = shell(f"{{}} train {planted[0]} --out {tmp_path}/run {options} >/dev/full")
    assert done.returncode == 0
    *_, last = done.stderr.splitlines()
    assert last.startswith("fastqt: warning: the summary of the training cannot be written: ")
    assert (tmp_path / "run" / "finished.json").exists()


def test_a_file_does_not_get_the_number_of_a_closed_stream(tmp_path):
    """Otherwise what libraries print on standard error would be written to the file."""
    program = """
import os, sys
from fastqt.sentences.cli import main
try:
    main(["--version"])
except SystemExit:
    pass
with open("x", "w") as file:
    os.write(2, b"a warning")
    file.write(str(file.fileno() > 2))
"""
    command = f'{sys.executable} -c "$1" <&- 2>&-'
    subprocess.run(["bash", "-c", command, "-", program], cwd=tmp_path, check=True)
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
