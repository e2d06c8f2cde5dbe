"""Writes a file completely or not at all, never in the place of something else; and digests of files."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from fastqt.errors import InputError

CHUNK = 1 << 20  # bytes
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
