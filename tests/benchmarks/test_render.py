"""Tables, figures and claims of the README, the documents and docstrings are those of stored runs."""

import os
import re
import subprocess
import sys

import pytest
import torch

from benchmarks import exactness, precision
from benchmarks.allocator import GIVEN_BACK, KEPT, allocator_table
from benchmarks.measure import run_tables
from benchmarks.measure.tables import alignment, rounded, table
from benchmarks.paths import ROOT
from benchmarks.render import PAGES, newest_run, rendered, rows_of, stored_logistic
from fastqt.sentences.evaluation import logistic
from tests.shared import page_blocks
from tests.shared.tolerances import relative


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_show_stored_runs(page):
    text = page.read_text()
    assert rendered(text) == text, "run `python -m benchmarks.render`"


def test_docstring_has_the_ratios_of_the_stored_run():
    """The ratios are those of scikit-learn's fastest solver, at the tolerance at which it converges."""
    ratios = [
        min(peer["times_faster"] for peer in row["peers"].values() if peer["tol"] <= 1e-6)
        for row in rows_of(stored_logistic(), "test_logistic")
    ]
    assert f"takes {min(ratios):.0f} to {max(ratios):.0f} times the CPU time" in logistic.__doc__


ALL = {"README.md": ROOT / "README.md", **page_blocks.PAGES}


def test_columns_are_aligned_by_what_is_in_them():
    text = table(
        ("loss", "N", "ms", "score"), [("`a`", "1,024", "–", "60.0 ± 10.0"), ("b", "8", "6,952.2", "1")]
    )
    assert text.splitlines()[1] == "| --- | ---: | ---: | ---: |"
    assert text.splitlines()[3] == "| b | 8 | 6,950 | 1 |"


def test_a_table_without_rows_is_refused():
    """As that of a run which lacks what the table shows."""
    with pytest.raises(ValueError, match="a table of loss, ms has no rows"):
        table(("loss", "ms"), iter(()))


@pytest.mark.parametrize(
    ("cell", "wanted"),
    [
        ("936.86 ×", "940 ×"),
        ("32.46 ×", "32 ×"),
        ("9.96 ×", "9.96 ×"),
        ("21,217.0", "21,200"),
        ("130.3", "130"),
        ("99.97", "99.97"),
        ("33,554,432", "33,554,432"),
        ("0.3 / 164.25", "0.3 / 164.25"),
        ("–", "–"),
    ],
)
def test_figures_have_the_digits_that_a_run_knows(cell, wanted):
    assert rounded(cell) == wanted


def columns(text: str) -> list[tuple[str, str, list[str]]]:
    """The columns of all tables of a page: name, alignment, cells."""
    tables = re.findall(r"^(\|.+\|\n\| ?:?-.*\|\n(?:\|.*\|\n?)*)", text, flags=re.MULTILINE)
    parts = []
    for lines in (part.splitlines() for part in tables):
        header, marks, *body = (
            [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines
        )
        parts += [
            (name, mark, [row[at] for row in body])
            for at, (name, mark) in enumerate(zip(header, marks, strict=True))
        ]
    return parts


@pytest.mark.parametrize("name", ALL)
def test_text_is_flush_left_and_figures_are_flush_right(name):
    for column, mark, cells in columns(ALL[name].read_text()):
        is_right = mark.endswith(":")
        assert is_right == (alignment(cells) == "---:"), f"column {column!r}: {mark}, {cells[:3]}"


@pytest.mark.parametrize("name", ALL)
def test_no_table_is_only_a_head(name):
    assert [column for column, _, cells in columns(f"{ALL[name].read_text()}\n") if not cells] == []


@pytest.mark.parametrize("name", ALL)
def test_no_figure_has_digits_that_no_run_knows(name):
    for column, _, cells in columns(ALL[name].read_text()):
        assert [cell for cell in cells if rounded(cell) != cell] == [], column


# Tables of runs that are stored on their own.
OWN_RUNS = {"logistic", "splade", "distributed", "torch engine", "matryoshka", "margin", "peak"}


def test_the_tables_of_a_stored_run_are_those_of_the_documents():
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    shown = dict(re.findall(r"<!-- results: ([\w ]+) -->\n(.*?)\n<!-- end -->", text, flags=re.DOTALL))
    found = run_tables.tables_of(newest_run())
    assert run_tables.TABLES.keys() - OWN_RUNS == found.keys()
    assert {name: shown[name] for name in found} == found


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


def test_the_ratio_is_what_giving_memory_back_costs() -> None:
    row = {"case": "the loss", "who": "fastqt", "seconds": {KEPT: 0.1, GIVEN_BACK: 0.15}}
    line = allocator_table([row]).splitlines()[-1]
    assert line == "| the loss | fastqt | 100 | 150 | 1.50 × |"


def test_tables_show_the_largest_differences_and_the_mean_one() -> None:
    losses = {
        "float32": [[5.0, 4.0], [5.5, 4.5], [5.1, 4.1]],
        "bfloat16": [[5.0, 4.125], [5.5, 4.5], [5.1, 4.1]],
    }
    line = precision.curves_table([{"model": "m", "losses": losses}]).splitlines()[-1]
    assert line == "| m | 3 | 4.2000 | 4.2417 | 0.1250 | 0.5000 | +0.0417 ± 0.0417 |"
    speeds = {"float32": 100.0, "bfloat16": 250.0}
    assert precision.speeds_table([{"model": "m", "sentences_per_second": speeds}]).endswith("| 2.50 × |")


@pytest.mark.parametrize("scale", [2.0, 6.0])
def test_the_truth_is_float64s_where_nothing_cancels(scale):
    queries, candidates = exactness.pairs()
    loss, gradient = exactness.truth(queries, candidates, scale)
    leaf = queries.double().requires_grad_()
    value = exactness.eager(leaf, candidates.double(), scale)
    (found,) = torch.autograd.grad(value, leaf)
    assert abs(loss - value.item()) < 1e-12
    assert relative(found, gradient) < 1e-12


@pytest.mark.parametrize("scale", [10, 22])
def test_errors_are_those_of_the_stored_run(scale):
    """Within a factor of four: other CPUs sum in another order."""
    found = exactness.measured(*exactness.pairs(), scale)
    (stored,) = (r for r in exactness.stored()["found"] if r["scale"] == scale)
    assert found["loss"] == pytest.approx(stored["loss"], rel=1e-6)
    for name in exactness.NAMES:
        assert stored["errors"][name] / 4 < found["errors"][name] < 4 * stored["errors"][name]


def test_what_the_stored_run_shows():
    """The claims of docs/concepts.md on this plot."""
    found = exactness.stored()["found"]
    assert [r["scale"] for r in found] == list(exactness.SCALES)
    for r in found:
        if r["loss"] > 1e-9:
            assert r["errors"]["fastqt"] < 1e-5
        if r["loss"] < 1e-7:
            assert r["errors"]["eager"] > 0.5
