"""Digests of the files that a run depends on, so that it is not continued with other ones."""

from __future__ import annotations

import hashlib
from pathlib import Path

CHUNK = 1 << 20  # bytes


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
