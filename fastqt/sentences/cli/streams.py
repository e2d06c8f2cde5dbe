"""The standard streams of a command, whichever of them are closed, full or of another encoding."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import TextIO

BAD_INPUT = 2  # exit status; argparse uses the same


def fail(message: str, status: int = BAD_INPUT) -> int:
    with contextlib.suppress(OSError):  # there is nowhere else to say it
        print("fastqt:", message.replace("\n", " "), file=sys.stderr, flush=True)
    return status


def prepare_streams() -> None:
    """Makes the standard streams safe to use, whichever of them are closed and whatever their encoding is."""
    if None in (sys.stdin, sys.stdout, sys.stderr):
        # The next file to be opened would get the number of a closed stream, and what libraries print there.
        while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
            pass
        os.close(descriptor)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # it stays open until the process ends
    for stream in (sys.stdout, sys.stderr):
        # With LC_ALL=C, standard output has "surrogateescape", which refuses what the encoding does not have.
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="backslashreplace")


def is_stuck(stream: TextIO) -> bool:
    """Whether what was printed to a stream cannot be written."""
    try:
        stream.flush()
    except OSError:
        return True
    return False


def discard_what_cannot_be_written() -> None:
    """Keeps Python from trying to write it again at its exit, which would give a traceback and status 120."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and is_stuck(stream):
            with contextlib.suppress(OSError), open(os.devnull, "wb") as null:
                os.dup2(null.fileno(), stream.fileno())


def in_words(error: OSError) -> str:
    reason = error.strerror or str(error)
    if error.filename is not None:
        return f"{error.filename}: {reason}"
    to_stdout = isinstance(error, BrokenPipeError) or is_stuck(sys.stdout)
    return f"cannot write{' to standard output' if to_stdout else ''}: {reason}"
