"""Reads JSON that is larger than memory should hold, value by value."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from fastqt.errors import InputError, one_line

READ_BYTES = 1 << 18
LONGEST_VALUE = 1 << 20  # characters of a value that is taken whole
WHITE = re.compile(r"[ \t\n\r]*")
OF_NUMBERS = re.compile(r"[-+.eE0-9]*")


class JsonStream:
    """JSON text of which a part is in memory. Objects and lists are walked through, other values taken whole.

    `file` is the text in UTF-8, and `path` its name, for messages. Every method refuses text that is not
    JSON, and a value that is taken whole and longer than a mebibyte.
    """

    def __init__(self, file: IO[bytes], path: str | Path) -> None:
        self._file, self._path = file, path
        self._bytes = codecs.getincrementaldecoder("utf-8-sig")()
        self._scan = json.JSONDecoder().raw_decode
        self._text, self._at, self._ended = "", 0, False

    def members(self) -> Iterator[str]:
        """The keys of the object that begins here. After each, its value must be taken from the stream."""
        for _ in self._places("{", "}"):
            key = self.value()
            if not isinstance(key, str):
                raise self._damaged(f"want a text as a key, got {key!r:.40}")
            self._expect(":")
            yield key

    def items(self) -> Iterator[None]:
        """Yields before each value of the list that begins here, which must then be taken from the stream."""
        return self._places("[", "]")

    def value(self) -> Any:
        """Takes the value that begins here."""
        self._next()
        while True:
            try:
                value, end = self._scan(self._text, self._at)
            except json.JSONDecodeError as error:
                if self._ended or len(self._text) - self._at > LONGEST_VALUE:
                    raise self._damaged(error.msg) from error
            # A number of too many digits, or values that are nested too deeply.
            except (ValueError, RecursionError) as error:
                raise self._damaged(one_line(error)) from error
            else:
                # A number, even "1" of "1e-7", could go on in what has not been read.
                behind = OF_NUMBERS.match(self._text, end)
                if self._ended or (behind and behind.end() < len(self._text)):
                    self._at = end
                    return value
                if len(self._text) - self._at > LONGEST_VALUE:
                    raise self._damaged(f"want values of at most {LONGEST_VALUE:,} characters")
            self._read_more()

    def end(self) -> None:
        """Checks that nothing follows."""
        if self._next():
            raise self._damaged(f"want nothing behind the whole, got {self._next()!r}")

    def _places(self, opening: str, closing: str) -> Iterator[None]:
        """Yields before each member of an object or a list, and takes the signs around the members."""
        self._expect(opening)
        if self._next() != closing:
            yield
            while self._next() == ",":
                self._at += 1
                yield
        self._expect(closing)

    def _expect(self, wanted: str) -> None:
        if (character := self._next()) != wanted:
            raise self._damaged(
                f"want {wanted!r}, got {character!r}" if character else f"want {wanted!r}, got its end"
            )
        self._at += 1

    def _next(self) -> str:
        """The next character that is not white space, which is not taken; "" at the end."""
        while True:
            space = WHITE.match(self._text, self._at)
            assert space is not None  # for mypy: the pattern matches an empty text
            self._at = space.end()
            if self._at < len(self._text):
                return self._text[self._at]
            if self._ended:
                return ""
            self._read_more()

    def _read_more(self) -> None:
        """Reads as much again as is in memory, or more, so that a long value is not scanned many times."""
        rest = self._text[self._at :]
        data = self._file.read(max(READ_BYTES, len(rest)))
        try:
            self._text, self._at = rest + self._bytes.decode(data, final=not data), 0
        except UnicodeDecodeError as error:
            raise InputError(f"{self._path} is not UTF-8: {one_line(error)}") from None
        self._ended = not data

    def _damaged(self, reason: str) -> InputError:
        return InputError(f"{self._path} is damaged: {one_line(reason)}")
