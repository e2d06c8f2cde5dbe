"""Fields of damaged JSON are named, and their values are shown shortly."""

import pytest

from fastqt.errors import InputError, one_line
from fastqt.sentences.json_text import field, parse, parse_object, read_object


def test_a_field_is_returned_if_it_has_the_type():
    values = parse_object('{"a": 1, "b": 2.5, "c": "x", "d": [], "e": {}}', "f")
    for name, kind in (("a", int), ("a", float), ("b", float), ("c", str), ("d", list), ("e", dict)):
        assert field(values, name, kind, "f") == values[name]
    assert parse("[1]", "f", list) == [1]


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        (1.0, int, r"a: want an integer, got 1\.0"),
        (False, float, "a: want a number, got False"),
        ("x" * 99, int, "a: want an integer, got a text"),
        (["x"], str, "a: want a text, got a list"),
        (None, dict, "a: want an object, got None"),
    ],
)
def test_a_field_of_another_type_is_refused(value, kind, message):
    with pytest.raises(InputError, match=f"^f is damaged: {message}$"):
        field({"a": value}, "a", kind, "f")
    with pytest.raises(InputError, match=r"^f is damaged: a is missing$"):
        field({}, "a", kind, "f")


def test_absence_is_for_the_caller_to_explain(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_object(tmp_path / "none", most_bytes=9)


def test_text_of_a_file_is_shown_on_one_line():
    assert one_line("a\nb\x00c\u2028\ud800é") == r"a\nb\x00c\u2028\ud800é"
    assert len(one_line("\n" * 999, 50)) == 50
