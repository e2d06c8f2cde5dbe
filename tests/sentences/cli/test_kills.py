"""Commands are killed at random moments: what was there before is there, or its successor, whole."""

import pytest

from tests.shared.killed_commands import COMMANDS, killed


@pytest.mark.slow
def test_what_was_there_or_its_successor_is_there_whole():
    pytest.importorskip("sentence_transformers", reason="the extra st is not installed")
    outcomes = killed(2 * len(COMMANDS), seed=1)
    for times in outcomes.values():
        assert times["old"] + times["between"] + times["new"] == 2, outcomes
