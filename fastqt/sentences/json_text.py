"""Writes JSON, which has no NaN, and reads JSON that may be damaged: an InputError names what is wrong."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from fastqt.errors import InputError, one_line


class Digest(Protocol):
    """What takes bytes, as the objects of `hashlib` do."""

    def update(self, data: bytes, /) -> None:
        """Takes further bytes."""


def to_json(value: Any, indent: int | None = None) -> str:
    """A value as JSON. Numbers that are NaN or infinite are null: with them it would be no JSON."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def null_is_nan(figures: dict[str, Any]) -> dict[str, Any]:
    """Figures that `to_json` wrote, with NaN where it wrote null."""
    return {name: math.nan if value is None else value for name, value in figures.items()}


def parse_object(text: str | bytes, source: str | os.PathLike[str]) -> dict[str, Any]:
    """Parses a JSON object from a file `source`, in UTF-8 if it is bytes.

    A key that occurs twice is refused, and so are values that are nested too deeply.
    """
    try:
        value = json.loads(
            text.decode("utf-8-sig") if isinstance(text, bytes) else text, object_pairs_hook=_distinct
        )
    # Apart from a syntax error, ValueError is a number of too many digits.
    except (ValueError, RecursionError) as error:
        raise InputError(f"{os.fspath(source)} is damaged: {one_line(error)}") from error
    if not isinstance(value, dict):
        raise InputError(f"{os.fspath(source)} is damaged: want an object, got {_kind(value)}")
    return value


def read_object(
    path: str | os.PathLike[str], *, most_bytes: int, digest: Digest | None = None
) -> dict[str, Any]:
    """Reads a file that holds a JSON object; one of more than `most_bytes` is refused before it is read.

    Its bytes go into `digest` too.

    FileNotFoundError where there is no such file: callers say what its absence means.
    """
    try:
        with Path(path).open("rb") as file:
            if (size := os.fstat(file.fileno()).st_size) > most_bytes:
                raise InputError(f"{os.fspath(path)}: want at most {most_bytes:,} bytes, got {size:,}")
            text = file.read()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise InputError(f"cannot read {os.fspath(path)}: {error.strerror or error}") from error
    if digest is not None:
        digest.update(text)
    return parse_object(text, path)


def field(values: dict[str, Any], name: str, kind: type, source: str | os.PathLike[str]) -> Any:
    """Takes a field of an object from a file `source`, and checks its type.

    `kind` is int, float (an int will do), str, list or dict; True and False are no numbers.
    """
    if name not in values:
        raise InputError(f"{os.fspath(source)} is damaged: {name} is missing")
    value = values[name]
    if not has_type(value, kind):
        raise InputError(f"{os.fspath(source)} is damaged: {name}: want {NAMES[kind]}, got {_kind(value)}")
    return value


def has_type(value: Any, kind: type) -> bool:
    """Whether a value of JSON has a type: an int is a float too, and True and False are no numbers."""
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


NAMES = {int: "an integer", float: "a number", str: "a text", list: "a list", dict: "an object"}
NAMES[bool] = "true or false"


def _kind(value: Any) -> str:
    """What a value is, shortly: a damaged file may hold a value of any length."""
    text = repr(value) if isinstance(value, (int, float, str)) or value is None else ""
    return text if 0 < len(text) <= 40 else NAMES.get(type(value), type(value).__name__)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        twice = next(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)
        raise ValueError(f"the key {twice[:40]!r} occurs twice")
    return members


# What evaluations store beside the figures of a task.
DETAILS = ("subsets", "folds", "C", "t", "sizes", "undefined")


def flat_figures(figures: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The figures of a task by their names, with those of its parts behind their name, without details."""
    for name, value in figures.items():
        if isinstance(value, dict) and name not in DETAILS:
            yield from flat_figures(value, f"{prefix}{name} ")
        elif name not in DETAILS:
            yield prefix + name, value
