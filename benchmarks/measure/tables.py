"""Tables in Markdown: text is flush left and figures flush right, with as many digits as a run can know."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from math import floor, log10

# A number with its unit or sign; several of them, such as a mean with its deviation, make one figure too.
ONE_FIGURE = r"[<>≥≤~+−-]? ?[\d,]*\.?\d+(e[-+]?\d+|( · 10)?⁻?[⁰¹²³⁴⁵⁶⁷⁸⁹]+)?( ?(×|%|ms|µs|s|h|[KMG]i?B))?"
FIGURE = re.compile(rf"{ONE_FIGURE}(( ± | to | / |, | \+ ){ONE_FIGURE})*")
NONE = ("", "–", "…")
MEASURED = re.compile(r"(?P<number>[\d,]+\.\d+)(?P<times> ×)?")


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table whose columns are aligned by what is in them, and whose figures are rounded.

    Raises:
        ValueError: there are no rows, as where a run does not have what the table shows.
    """
    body = [[rounded(cell) for cell in row] for row in rows]
    names = list(header)
    if not body:
        raise ValueError(f"a table of {', '.join(names)} has no rows")
    lines = [
        names,
        [alignment([row[at] for row in body if at < len(row)]) for at in range(len(names))],
        *body,
    ]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def alignment(cells: Sequence[str]) -> str:
    """The line below the name of a column: flush right if most of its cells are figures."""
    shown = [cell.strip("*` ") for cell in cells if cell.strip("*` ") not in NONE]
    figures = [cell for cell in shown if FIGURE.fullmatch(cell)]
    return "---:" if 2 * len(figures) > len(shown) else "---"


def rounded(cell: str) -> str:
    """A cell whose measured figure has at most three digits, or two if it is a ratio of ten and more.

    Another run would not repeat the digits that are left out. Numbers without a fraction are counts and stay.
    """
    match = MEASURED.fullmatch(cell)
    if match is None:
        return cell
    value = float(match["number"].replace(",", ""))
    digits, least = (2, 10) if match["times"] else (3, 100)
    if value < least:
        return cell
    places = digits - 1 - floor(log10(value))
    return f"{round(value, places):,.0f}{match['times'] or ''}"


def number(value: float | None) -> str:
    """A figure with one decimal; a dash where there is none."""
    return "–" if value is None else f"{value:.1f}"
