"""Files that are written whole or not at all, their digests, and the lock of a directory.

Two processes never write a run or a model to the same directory, and a file takes the place of nothing else.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import platform
import secrets
import shutil
import stat
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from fastqt.errors import InputError, one_line
from fastqt.sentences.json_text import to_json

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

CHUNK = 1 << 20  # bytes
LOCK = ".fastqt.lock"
LOCKED_BYTE = 1 << 30  # On Windows nobody else can read the byte that is locked: it is one beyond the text.
PARTIAL = ".partial"  # how the name of a file that is still being written ends


def write_atomically(path: str | Path, write: Callable[[Path], object]) -> None:
    """Replaces or creates a file so that, after a crash at any moment, it is the old or the complete new one.

    The data, which `write` writes to the path that it is given, go to a temporary file beside it, which is
    synced and then renamed. A killed process leaves that temporary file behind; its name ends in `.partial`.
    A symbolic link stays a link, and what it points to is written. An existing file keeps its permissions. A
    FIFO or a character device stays what it is, and is given the data once they are complete. A block device
    or a socket is refused.

    After an OSError the file is what it was before, except that the error may also come from syncing the
    directory after the complete new file is in its place.
    """
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        mode = None
    if mode is None or stat.S_ISREG(mode):
        _replace(Path(path), write, None if mode is None else stat.S_IMODE(mode))
    elif stat.S_ISDIR(mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    elif stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
        _write_through(Path(path), write)
    else:
        raise InputError(f"{path}: want a file, a FIFO or a character device to write to, got another kind")


def check_ending(path: str | Path, ending: str) -> None:
    """Checks that the name of a file to write says what it will hold.

    `ending` is the only format that can be written, for example ".npy". What exists and is not a regular
    file, such as a FIFO, may have any name.
    """
    path = Path(path)
    if path.suffix != ending and (path.is_file() or not path.exists()):
        raise InputError(f"{path}: want a name that ends in {ending}, got {path.suffix or 'no ending'}")


def check_can_be_written(path: str | Path) -> None:
    """Checks, before hours of work, that a file can be written to its place."""
    path = Path(path)
    if path.is_dir():
        raise InputError(f"cannot write {path}: it is a directory")
    if not path.parent.is_dir():
        raise InputError(f"cannot write {path}: {path.parent} is not a directory")
    if not path.exists() and not os.access(path.parent, os.W_OK):
        raise InputError(f"cannot write {path}: {path.parent} is not writable")


def _replace(path: Path, write: Callable[[Path], object], mode: int | None) -> None:
    """Writes a regular file; `mode` is None where none exists yet."""
    target = Path(os.path.realpath(path))
    partial = target.with_name(f"{target.name[:40]}.{secrets.token_hex(4)}{PARTIAL}")
    try:
        partial.touch(exist_ok=False)
        if mode is None:
            mode = stat.S_IMODE(partial.stat().st_mode)
        write(partial)
        partial.chmod(mode)  # safetensors creates files that only their owner can read
        sync(partial)
        partial.replace(target)
    except BaseException as error:
        with contextlib.suppress(OSError):  # the first error is the one to report
            partial.unlink()
        if isinstance(error, OSError) and str(error.filename) == str(partial):
            error.filename = str(path)
        raise
    sync(target.parent)


def _write_through(path: Path, write: Callable[[Path], object]) -> None:
    """Writes to a FIFO or a device what `write` wrote to a temporary file, which may seek."""
    with tempfile.TemporaryDirectory(prefix="fastqt-") as folder:
        partial = Path(folder) / "data"
        partial.touch()
        write(partial)
        with partial.open("rb") as source, path.open("wb") as out:
            shutil.copyfileobj(source, out)


def sync(path: Path) -> None:
    """Waits until a file, or the entries of a directory, are on the disk."""
    windows = sys.platform == "win32"
    if windows and path.is_dir():
        return  # Windows opens no directory as a file.
    descriptor = os.open(path, os.O_RDWR if windows else os.O_RDONLY)  # Windows syncs what may be written.
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest(path: Path) -> str:
    """The SHA-256 of a file's bytes."""
    sha256 = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            sha256.update(chunk)
    return sha256.hexdigest()


def joined_digest(*digests: str) -> str:
    """The SHA-256 of several texts, such as the digests of files."""
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()


def digest_of_folder(path: Path) -> str:
    """The SHA-256 of the names and the digests of all files in a directory."""
    sha256 = hashlib.sha256()
    for each in sorted(path.rglob("*")):
        if each.is_file():
            sha256.update(f"{each.relative_to(path).as_posix()}\0{digest(each)}\0".encode())
    return sha256.hexdigest()


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
