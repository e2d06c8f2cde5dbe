"""Tables and figures of the README, the documents and docstrings are those of stored runs."""

import pytest

from benchmarks.render import PAGES, rendered, rows_of, stored_logistic
from fastqt.sentences.evaluation import logistic


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
