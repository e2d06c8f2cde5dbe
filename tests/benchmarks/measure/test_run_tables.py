"""`pytest --benchmark` ends with the tables that the documents show."""

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from benchmarks import conftest
from benchmarks.measure import run_tables
from benchmarks.paths import ROOT
from benchmarks.render import PAGES, newest_run

# Tables of runs that are stored on their own.
OWN_RUNS = {"logistic", "distributed", "torch engine", "matryoshka", "margin", "peak"}


def test_the_tables_of_a_stored_run_are_those_of_the_documents():
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    shown = dict(re.findall(r"<!-- results: ([\w ]+) -->\n(.*?)\n<!-- end -->", text, flags=re.DOTALL))
    found = run_tables.tables_of(newest_run())
    assert run_tables.TABLES.keys() - OWN_RUNS == found.keys()
    assert {name: shown[name] for name in found} == found


class Reporter(list):
    """Keeps what is written to the terminal."""

    def section(self, title):
        self.append(f"== {title}")

    def write_line(self, line):
        self.append(line)


def config(benchmarks, is_asked):
    return SimpleNamespace(getoption=lambda name: is_asked, _benchmarksession=benchmarks)


def test_the_summary_has_the_tables_of_what_has_run():
    (stored,) = (each for each in newest_run()["benchmarks"] if each["name"].startswith("test_call"))
    done = SimpleNamespace(
        name=stored["name"],
        extra_info=stored["extra_info"],
        stats=SimpleNamespace(rounds=3, median=stored["stats"]["median"]),
    )
    failed = SimpleNamespace(name="test_loss", extra_info={}, stats=SimpleNamespace(rounds=0))
    reporter = Reporter()
    conftest.pytest_terminal_summary(
        reporter, config(SimpleNamespace(benchmarks=[done, failed]), is_asked=True)
    )
    title, table, machine = reporter
    assert title == "== call"
    assert table == run_tables.call_table(newest_run())
    assert re.match(r"\nMeasured on: .+, \d+ threads?, \w+, Python 3\.", machine)

    for session, is_asked in ((SimpleNamespace(benchmarks=[done]), False), (None, True)):
        silent = Reporter()
        conftest.pytest_terminal_summary(silent, config(session, is_asked))
        assert silent == []


@pytest.mark.slow
def test_pytest_prints_the_table_without_matplotlib():
    program = "import sys, pytest; sys.modules['matplotlib'] = None; sys.exit(pytest.main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "--benchmark", "-q", "-p", "no:cacheprovider"]
    # A process of pytest-xdist prints no tables, and these variables would make this one such a process.
    environment = {name: x for name, x in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [*command, "benchmarks/bench_call.py"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| at N=8, D=8 | µs |" in done.stdout
    assert "Measured on: " in done.stdout
