"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table; all columns are flush right."""
    lines = [list(header), *map(list, rows)]
    lines.insert(1, ["---:"] * len(lines[0]))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def number(value: float | None) -> str:
    """A figure with one decimal; a dash where there is none."""
    return "–" if value is None else f"{value:.1f}"
