"""JSON that is read value by value gives what Python's own parser gives, wherever the parts of it end."""

import io
import json
import random

import pytest

from fastqt.errors import InputError
from fastqt.sentences.text import json_stream
from fastqt.sentences.text.json_stream import JsonStream

DOCUMENT = {
    "words": ["a", "é\n", "\u2028", "x" * 50],
    "": {},
    "numbers": {"one": [1, -2.5, 1e-7, 12345678901], "none": [], "two": [[1], {"a": [None, True]}]},
    "last": -17.25,
}


def taken(stream: JsonStream, depth: int = 2):
    """The value that begins in a stream, of which objects and lists are walked through down to a depth."""
    kind = stream._next()
    if kind == "{" and depth:
        return {key: taken(stream, depth - 1) for key in stream.members()}
    if kind == "[" and depth:
        return [taken(stream, depth - 1) for _ in stream.items()]
    return stream.value()


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 1 << 18])
@pytest.mark.parametrize("layout", [{}, {"indent": 3}, {"ensure_ascii": False, "separators": (",", ":")}])
def test_values_are_those_of_the_whole_text(monkeypatch, size, layout):
    monkeypatch.setattr(json_stream, "READ_BYTES", size)
    for document in (DOCUMENT, [DOCUMENT, 3], [], {}, [12, 34], -5.5):
        stream = JsonStream(io.BytesIO(json.dumps(document, **layout).encode()), "x.json")
        assert taken(stream) == document
        stream.end()


def test_damaged_text_is_refused_where_python_refuses_it(monkeypatch):
    monkeypatch.setattr(json_stream, "READ_BYTES", 5)
    generator = random.Random(0)
    whole = json.dumps({"a": [1.5, 2], "b": {"c": "d"}})
    refused = 0
    for _ in range(400):
        text = list(whole)
        text[generator.randrange(len(text))] = generator.choice('{}[]",:x1 \\')
        text = "".join(text)
        try:
            wanted = json.loads(text)
        except ValueError:
            wanted = None
        stream = JsonStream(io.BytesIO(text.encode()), "x.json")
        try:
            found = taken(stream)
            stream.end()
        except InputError:
            found, refused = None, refused + 1
        assert found == wanted, text
    assert refused > 100


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "want '{', got its end"),
        (b"[1]", r"want '{', got '\['"),
        (b'{"a" 1}', "want ':', got '1'"),
        (b"{1: 1}", "want a text as a key, got 1"),
        (b'{"a": 1', "want '}', got its end"),
        (b'{"a": 1}}', "want nothing behind the whole, got '}'"),
        (b'{"a": \xff}', "is not UTF-8"),
        (b'{"a": ' + b"[" * 100_000, "recursion"),
        (b'{"a": ' + b"9" * 5000 + b"}", "4300 digits"),
        (b'{"a": "' + b"x" * (1 << 21) + b'"', "Unterminated string"),
        (b'{"a": 1' + b"e" * (1 << 21), "want values of at most 1,048,576 characters"),
        (b'{"a": ' + b" " * (1 << 21), "Expecting value"),
    ],
    ids=range(12),
)
def test_what_is_no_object_is_refused_in_words(data, message):
    stream = JsonStream(io.BytesIO(data), "x.json")

    def read():
        for _ in stream.members():
            stream.value()
        stream.end()

    with pytest.raises(InputError, match=message) as caught:
        read()
    assert str(caught.value).isprintable()
    assert "x.json" in str(caught.value)


def test_little_of_the_text_is_in_memory():
    """Eight megabytes are walked through, and at no time is more than a megabyte of them kept."""

    class Long(io.RawIOBase):
        parts = 0

        def read(self, size=-1):
            self.parts += 1
            if self.parts == 1:
                return b"["
            return b"[%s0], " % (b"1, " * 2000) * 40 if self.parts <= 30 else b"0]" * (self.parts == 31)

    stream = JsonStream(Long(), "x.json")
    longest = 0
    for _ in stream.items():
        stream.value()
        longest = max(longest, len(stream._text))
    assert longest < 1 << 20
