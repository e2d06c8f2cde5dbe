"""What a refusal must look like: one printable line that names what is refused."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path


class UnhelpfulRefusalError(Exception):
    """An error of the right type whose message does not help."""


def check_file_refusal(error: Exception, *paths: Path) -> None:
    """Checks that the message of an `InputError` names one of these files."""
    _check(error, any(path.name in str(error) for path in paths))


def check_argument_refusal(error: Exception, names: Collection[str]) -> None:
    """Checks that the message of a `ValueError` or `TypeError` begins with one of these names."""
    _check(error, re.split(r"\W", str(error), maxsplit=1)[0] in names)


def _check(error: Exception, names: bool) -> None:
    if not names or not str(error).isprintable():
        raise UnhelpfulRefusalError(f"names nothing in one printable line: {str(error)!r}") from error
