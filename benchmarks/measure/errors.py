"""Errors as stored results hold them: with their causes, and long ones with their beginning and their end."""

from __future__ import annotations

import traceback
from collections.abc import Iterator

MOST_OF_A_MESSAGE = 2000  # characters of each error in a chain
MOST_OF_A_TRACEBACK = 16_000


def shortened(text: str, most: int) -> str:
    """A text, or its beginning and its end where it has more than `most` characters.

    Compilers name a cause at the end of a long message, and what they compiled at its beginning.
    """
    if len(text) <= most:
        return text
    head = most // 2
    tail = most - head
    return f"{text[:head]}\n… {len(text) - most} characters …\n{text[-tail:]}"


def chain(error: BaseException) -> Iterator[BaseException]:
    """An error, what caused it, what caused that, and so on."""
    errors: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in errors:
        yield following
        errors.append(following)
        context = None if following.__suppress_context__ else following.__context__
        following = following.__cause__ or context


def words(error: BaseException) -> str:
    """The type and the message of an error and of each of its causes."""
    texts = (f"{type(e).__name__}: {e}" for e in chain(error))
    return "\ncaused by ".join(shortened(text, MOST_OF_A_MESSAGE) for text in texts)


def traced(error: BaseException) -> str:
    """The traceback of an error and of its causes."""
    return shortened("".join(traceback.format_exception(error)), MOST_OF_A_TRACEBACK)
