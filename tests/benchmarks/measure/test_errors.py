"""Stored errors keep their beginning, their end and their causes."""

import pytest

from benchmarks.measure.errors import MOST_OF_A_MESSAGE, shortened, traced, words


def raised():
    """An error whose cause has a cause, which is what went wrong."""
    found = NameError("the culprit")
    for level in range(3):
        outer = RuntimeError(f"level {level}\n" + "source\n" * 2000 + f"end of level {level}")
        outer.__cause__ = found
        found = outer
    return found


def test_a_chain_is_told_to_its_end_with_the_ends_of_long_messages():
    said = words(raised())
    assert said.startswith("RuntimeError: level 2\n")
    for depth in (0, 1, 2):
        assert f"level {depth}\nsource" in said
        assert f"end of level {depth}" in said
    assert said.endswith("caused by NameError: the culprit")
    assert len(said) < 5 * MOST_OF_A_MESSAGE
    assert "NameError: the culprit" in traced(raised())


def test_a_context_counts_unless_it_is_suppressed():
    def error(suppressed):
        try:
            try:
                raise KeyError("inner")
            except KeyError:
                if suppressed:
                    raise ValueError("outer") from None
                raise ValueError("outer")  # noqa: B904
        except ValueError as found:
            return found

    assert words(error(False)) == "ValueError: outer\ncaused by KeyError: 'inner'"
    assert words(error(True)) == "ValueError: outer"


def test_a_circle_of_causes_ends():
    error = ValueError("a")
    error.__cause__ = other = ValueError("b")
    other.__cause__ = error
    assert words(error) == "ValueError: a\ncaused by ValueError: b"


@pytest.mark.parametrize("most", [10, 11])
def test_a_long_text_keeps_its_beginning_and_its_end(most):
    text = "0123456789abcdef"
    assert shortened(text, len(text)) == text
    head, _, tail = shortened(text, most).split("\n")
    assert (len(head) + len(tail), text.startswith(head), text.endswith(tail)) == (most, True, True)
