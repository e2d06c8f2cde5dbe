"""A lock on a directory, so that two processes never write a run or a model to the same one."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from fastqt.errors import InputError, one_line
from fastqt.sentences.json_text import to_json

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

LOCK = ".fastqt.lock"
LOCKED_BYTE = 1 << 30  # On Windows nobody else can read the byte that is locked: it is one beyond the text.


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Holds the lock of a directory, or raises InputError that names the process that holds it.

    The operating system releases the lock when the process ends, however it ends. The file that carries it
    names its holder. It stays behind when a process is killed; that does no harm. On a file system without
    locks, a warning is issued and nothing is locked.
    """
    path = directory / LOCK
    while True:
        with path.open("a+", encoding="utf-8") as file:
            if not _lock(file, directory):
                yield
                return
            if not _is_still(path, file):
                continue  # its last holder removed the file between the two calls
            _name_holder(file)
            try:
                yield
            finally:
                # Before it is released, so that nobody holds a removed file. A file that stays does no harm.
                with contextlib.suppress(OSError):
                    path.unlink()
            return


@contextlib.contextmanager
def own_directory(directory: Path) -> Iterator[None]:
    """Creates a directory, if there is none, and holds its lock.

    Where it fails before anything is written, no directory is left behind that was not there.
    """
    new = [each for each in (directory, *directory.parents) if not each.exists()]
    try:
        with contextlib.ExitStack() as stack:
            try:
                directory.mkdir(parents=True, exist_ok=True)
                stack.enter_context(locked(directory))
            except OSError as error:
                raise InputError(f"cannot write to {directory}: {error.strerror}") from error
            yield
    except BaseException:
        for each in new:
            with contextlib.suppress(OSError):  # among others, where it is not empty
                each.rmdir()
        raise


def _lock(file: IO[str], directory: Path) -> bool:
    """Locks a file; returns whether the file system has locks."""
    try:
        _take(file)
    except (BlockingIOError, PermissionError):  # on Linux and macOS, on Windows
        raise InputError(
            f"{directory}: {_holder(file)} is writing in it: wait until it ends, or choose another directory"
        ) from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        warnings.warn(
            f"{directory} cannot be locked ({error.strerror}): let no other process write in it", stacklevel=4
        )
        return False
    return True


def _take(file: IO[str]) -> None:
    if sys.platform == "win32":
        os.lseek(file.fileno(), LOCKED_BYTE, os.SEEK_SET)
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
    else:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _is_still(path: Path, file: IO[str]) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _name_holder(file: IO[str]) -> None:
    file.truncate(0)
    file.write(to_json({"pid": os.getpid(), "host": platform.node()}) + "\n")
    file.flush()


def _holder(file: IO[str]) -> str:
    """Who holds the lock. The file is empty for a moment after it was locked, and anyone may write to it."""
    file.seek(0)
    try:
        holder = json.loads(file.read(1000))
        return f"process {int(holder['pid'])} on host {one_line(holder['host'], 100)}"
    except (ValueError, KeyError, TypeError, RecursionError):
        return "another process"
