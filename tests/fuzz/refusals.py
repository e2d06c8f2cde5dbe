"""What a refusal must look like: one printable line that names what is refused."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path


class UnhelpfulRefusalError(Exception):
    """An error of the right type whose message does not help."""


def check_file_refusal(error: Exception, *paths: Path) -> None:
    """Checks the message of an `InputError` about a file.

    Raises:
        UnhelpfulRefusalError: it names none of `paths`, or is not one printable line.
    """
    message = str(error)
    if not any(path.name in message for path in paths):
        raise UnhelpfulRefusalError(f"names no file: {message!r}") from error
    if not message.isprintable():
        raise UnhelpfulRefusalError(f"is not one printable line: {message!r}") from error


def check_argument_refusal(error: Exception, names: Collection[str]) -> None:
    """Checks the message of a `ValueError` or `TypeError` about an argument.

    Raises:
        UnhelpfulRefusalError: it does not begin with one of `names`, or is not one printable line.
    """
    message = str(error)
    first = re.match(r"\w+", message)
    if first is None or first[0] not in names:
        raise UnhelpfulRefusalError(f"names no argument: {message!r}") from error
    if not message.isprintable():
        raise UnhelpfulRefusalError(f"is not one printable line: {message!r}") from error
