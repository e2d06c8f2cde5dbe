"""The curves are drawn from stored runs alone, and the page shows those that can be drawn."""

import pytest

from benchmarks.papers import curves, pages, store
from benchmarks.papers.curves import PANELS, series
from benchmarks.papers.pages import CLASSIFICATION, CURVES


def log(shift):
    lines = [{"step": step, **dict.fromkeys(PANELS.values(), step / 10 + shift)} for step in (5, 10, 15)]
    return [lines[0], {"step": 7, "loss": 1.0}, *lines[1:]]


@pytest.fixture
def stored(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "STORED", tmp_path)
    for number, name in enumerate(CURVES["views-minilm"]):
        store.add("views-minilm", name, {"log": log(number)})
    for number, name in enumerate(CURVES["hours"]):
        tasks = {task: {"accuracy": 0.6 + number / 100} for task in CLASSIFICATION}
        store.add("hours", name, {"cpu_minutes": 3.0 * number, "tasks": tasks})
    return tmp_path


def test_a_series_has_the_lines_that_report_it():
    assert series(log(1.0), "alignment") == ([5, 10, 15], [1.5, 2.0, 2.5])


def test_a_line_for_each_seed_in_each_panel(stored):
    figure = curves.views(store.stored("views-minilm"))
    assert [axes.get_title() for axes in figure.axes] == [*PANELS, ""]
    assert len(figure.axes[-1].get_legend().get_texts()) == 2
    for axes in figure.axes[:-1]:
        drawn = [list(line.get_ydata()) for line in axes.lines]
        assert drawn == [[0.5 + seed, 1.0 + seed, 1.5 + seed] for seed in range(6)]
        assert [line.get_color() for line in axes.lines] == ["C0"] * 3 + ["C1"] * 3


def test_accuracy_over_minutes_has_a_point_for_each_stage(stored):
    (axes,) = curves.hours(store.stored("hours")).axes
    (quick, skip) = axes.lines
    assert list(quick.get_xdata()) == [0, 3, 6]
    assert list(quick.get_ydata()) == pytest.approx([60, 61, 62])
    assert list(skip.get_xdata()) == [9, 12, 15]
    assert {line.get_marker() for line in axes.lines} == {"o"}


def test_only_complete_tables_are_drawn_and_the_same_each_time(stored):
    first = {path.name: path.read_bytes() for path in curves.draw(stored)}
    assert set(first) == {"hours.svg", "views-minilm.svg"}
    assert {path.name: path.read_bytes() for path in curves.draw(stored)} == first
    assert pages.curves("hours", "x") == "![x](../benchmarks/results/papers/hours.svg)"
    assert pages.curves("views-masked-words", "x") == pages.NOT_STORED


def test_pictures_of_the_page_are_there():
    for table in CURVES:
        if pages.curves(table, "x") != pages.NOT_STORED:
            assert (curves.STORED / f"{table}.svg").exists(), "run `python -m benchmarks.papers.curves`"
