"""How a command ends where something fails that is not its own input; no torch is imported here."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from fastqt.errors import InputError, one_line


class OtherRankError(InputError):
    """A process that trains together with this one has failed, and this one can not go on without it.

    `is_told` says whether another process says it too, so that this one need not.
    """

    def __init__(self, message: str, *, is_told: bool = False) -> None:
        super().__init__(message)
        self.is_told = is_told


def warn(text: str) -> None:
    """Prints a warning on standard error; where that cannot be written, nobody reads it."""
    with contextlib.suppress(OSError):
        print(f"fastqt: warning: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def only_a_report(what: str) -> Iterator[None]:
    """A context for what only tells of a work: an error there is a warning, and the work goes on.

    `what` names it for the warning.
    """
    try:
        yield
    except (InputError, OSError) as error:
        reason = error.strerror or error if isinstance(error, OSError) else error
        warn(f"{what} cannot be written: {one_line(reason, 1000)}")
