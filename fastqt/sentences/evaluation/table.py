"""The table of results that `fastqt evaluate` prints: in per cent, with means over tasks and a baseline."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fastqt.sentences.json_text import flat_figures

NO_SHARES = ("mse", "alignment", "uniformity", "rank")  # figures that are not shown in per cent
TO_CHOOSE = ("cv_", "dev")  # begin the names of figures that chose a model or C, of which there is no mean

Figures = Mapping[str, Mapping[str, Any]]  # of each task, as `Results.tasks` has them
Column = dict[tuple[str, str], float]


def table_lines(tasks: Figures, baseline: Figures | None = None, name: str = "random") -> list[str]:
    """The lines of the table: task, figure, value; with a baseline its value and the difference to it.

    Below them are the means of figures that several tasks have. Figures are shown in per cent, but for
    NO_SHARES.
    """
    columns = [_with_means(each) for each in _columns(tasks, baseline)]
    keys = dict.fromkeys(key for column in columns for key in column)
    rows = [[*key, *_cells(key[1], [column.get(key, math.nan) for column in columns])] for key in keys]
    if baseline is not None:
        rows.insert(0, ["task", "figure", "model", name, "difference"])
    return _aligned(rows)


def _columns(*results: Figures | None) -> list[Column]:
    return [
        {(task, name): value for task, figures in each.items() for name, value in flat_figures(figures)}
        for each in results
        if each is not None
    ]


def _with_means(column: Column) -> Column:
    """A column with a mean of each figure that several tasks have; one that is not defined counts as none."""
    values: dict[str, list[float]] = {}
    for (_, name), value in column.items():
        if not name.startswith(TO_CHOOSE) and not math.isnan(value):
            values.setdefault(name, []).append(value)
    means = {
        (f"mean of {len(each)} tasks", name): math.fsum(each) / len(each)
        for name, each in values.items()
        if len(each) > 1
    }
    return {**column, **means}


def _cells(name: str, values: Sequence[float]) -> list[str]:
    is_share = name.split()[-1] not in NO_SHARES
    cells = ["–" if math.isnan(value) else f"{value:.2%}" if is_share else f"{value:.4f}" for value in values]
    if len(values) == 1:
        return cells
    ours, theirs = values
    difference = 100 * (ours - theirs) if is_share else ours - theirs
    return [*cells, "–" if math.isnan(difference) else f"{difference:+.{2 if is_share else 4}f}"]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as text: task and figure flush left, the others flush right."""
    sizes = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            f"{cell:<{size}}" if place < 2 else f"{cell:>{size}}"
            for place, (cell, size) in enumerate(zip(row, sizes, strict=True))
        )
        for row in rows
    ]
