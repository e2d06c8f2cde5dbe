"""Tables of the documents: text flush left, figures flush right, and no more digits than a run can know."""

import re

import pytest

from benchmarks.measure.tables import alignment, rounded, table
from tests.shared.page_blocks import PAGES, ROOT

ALL = {"README.md": ROOT / "README.md", **PAGES}


def test_columns_are_aligned_by_what_is_in_them():
    text = table(
        ("loss", "N", "ms", "score"), [("`a`", "1,024", "–", "60.0 ± 10.0"), ("b", "8", "6,952.2", "1")]
    )
    assert text.splitlines()[1] == "| --- | ---: | ---: | ---: |"
    assert text.splitlines()[3] == "| b | 8 | 6,950 | 1 |"


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
    tables = re.findall(r"^(\|.+\|\n\| ?:?-.*\|\n(?:\|.*\|\n?)+)", text, flags=re.MULTILINE)
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
def test_no_figure_has_digits_that_no_run_knows(name):
    for column, _, cells in columns(ALL[name].read_text()):
        assert [cell for cell in cells if rounded(cell) != cell] == [], column
