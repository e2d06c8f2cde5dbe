"""GLOSS's tables have a title for each column, and differences in the direction that they say."""

import pytest

from benchmarks.papers import gloss_pages
from benchmarks.papers.gloss_pages import SECTIONS, SOURCE, figures, gloss_ordering


@pytest.mark.parametrize(
    "name", [name for name in SECTIONS if name not in ("gloss samples", "gloss ordering")]
)
def test_each_column_has_a_title(name):
    lines = SECTIONS[name]().splitlines()
    assert len(lines) > 2
    assert len({line.count("|") for line in lines}) == 1


def record(*values):
    """A stored run with these per cent of CR, TREC, STS13, STS15 and STS-B."""
    cr, trec, sts13, sts15, stsb = (value / 100 for value in values)
    similar = {"STS13": {"all": {"pearson": sts13}}, "STS15": {"all": {"pearson": sts15}}}
    return {
        "tasks": {
            **{"CR": {"accuracy": cr}, "TREC": {"accuracy": trec}},
            **similar,
            "STSB": {"dev": {"pearson": 0.0}, "test": {"pearson": stsb}},
        }
    }


def test_differences_of_the_source_are_those_of_its_tables(monkeypatch):
    known = {f"{decoder}-{d}": record(*values) for (decoder, d), values in SOURCE.items()}
    monkeypatch.setattr(
        gloss_pages, "stored", lambda table: {**known, "mean of GloVe": record(1, 1, 1, 1, 1)}
    )
    assert figures(known["bow-100"]) == pytest.approx(SOURCE["bow", 100])
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in gloss_ordering().splitlines()[2:]]
    assert len(rows) == 8
    assert all(source == ours for _, source, ours in rows), "ours are the source's here"
    found = {title: source for title, source, _ in rows}
    # (77.85 - 76.35) of CR and TREC; (67.03 - 65.13) of the three STS tasks.
    assert found["d=300: supervised, positions − bags"] == "+1.5"
    assert found["bags of words: STS, d=300 − d=100"] == "+1.9"


def test_what_is_not_stored_yet_is_left_out(monkeypatch):
    monkeypatch.setattr(gloss_pages, "stored", lambda table: {"bow-100": record(70, 70, 40, 50, 60)})
    assert gloss_ordering() == "Not all runs of this table are stored yet."


def test_other_ways_of_training_stand_beside_the_source(monkeypatch):
    known = {"bow-300": record(70, 70, 40, 40, 40), "pos-300": record(70, 70, 40, 40, 40)}
    known["bow-300 of seed 1"] = record(70, 70, 50, 50, 50)
    monkeypatch.setattr(gloss_pages, "stored", lambda table: known)
    assert "of seed 1" not in gloss_ordering()
    known["pos-300 of seed 1"] = record(80, 80, 40, 40, 40)
    lines = gloss_ordering().splitlines()
    assert "| d=300 of seed 1: STS, bags − positions | +2.0 | +10.0 |" in lines
    assert "| d=300 of seed 1: supervised, positions − bags | +1.5 | +10.0 |" in lines
    assert "| d=300: STS, bags − positions | +2.0 | +0.0 |" in lines
