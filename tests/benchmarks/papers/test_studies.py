"""The parts of the figures have names of their own, and are stored as they are planned."""

import json

import pytest

from benchmarks.papers import store
from benchmarks.papers.plans import TABLES
from benchmarks.papers.studies import STUDIES


def test_figures_and_tables_have_different_names():
    assert not {*STUDIES} & {*TABLES}


@pytest.mark.parametrize("study", STUDIES)
def test_names_of_the_parts_of_a_figure_are_distinct(study):
    assert len({part.name for part in STUDIES[study]}) == len(STUDIES[study])


@pytest.mark.parametrize("study", STUDIES)
def test_stored_parts_have_the_settings_of_the_plan(study):
    planned = {part.name: part for part in STUDIES[study]}
    for name, record in store.stored(study).items():
        # The plan's settings as JSON has them, where a tuple is a list.
        assert record["settings"] == json.loads(json.dumps(planned[name].settings()))
        assert "/" + "work" not in json.dumps(record), "a path of a machine"
