"""Writes a whole directory, or nothing."""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from fastqt.errors import InputError
from fastqt.sentences.json_text import field, read_object
from fastqt.sentences.runs.files import PARTIAL

MANIFEST = "export.json"  # what an exported directory holds; by it --overwrite knows such a directory
LARGEST_FILE = 1 << 20  # bytes of an export.json


def check_folder(out: Path, *, overwrite: bool) -> None:
    """Checks, before any work, that a directory can be written: it is new or empty, or may be replaced.

    With `overwrite`, what `new_folder` wrote may be replaced, and nothing else: a user's own files beside it
    would be lost.
    """
    if not out.parent.is_dir():
        raise InputError(f"cannot write {out}: {out.parent} is not a directory")
    if not out.exists():
        return
    if not out.is_dir():
        raise InputError(f"out: want a directory, got the file {out}")
    if not any(out.iterdir()):
        return
    if not overwrite:
        raise InputError(
            f"out: want a new directory, or --overwrite to replace an earlier export; {out} holds files"
        )
    if others := sorted(_files(out) - _listed(out)):
        raise InputError(
            f"overwrite: want a directory with nothing but an earlier export, got {others[0]} in {out}"
        )


@contextlib.contextmanager
def new_folder(out: Path, about: dict[str, object]) -> Iterator[Path]:
    """Gives an empty directory to write to, which takes the place of `out` if nothing has failed.

    The files are listed in its export.json, with what is said in `about`. They can be read by whoever can
    read other files that the user makes.
    """
    out = out.resolve()
    token = secrets.token_hex(4)
    partial = out.with_name(f"{out.name[:40]}.{token}{PARTIAL}")
    try:
        partial.mkdir()
        yield partial
        _finish(partial, about)
        _take_place(partial, out, out.with_name(f"{out.name[:40]}.{token}.old"))
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError) and str(error.filename).startswith(str(partial)):
            error.filename = str(error.filename).replace(str(partial), str(out))
        raise


def _finish(folder: Path, about: dict[str, object]) -> None:
    files = sorted({*_files(folder), MANIFEST})
    text = json.dumps({**about, "files": files}, indent=2) + "\n"
    (folder / MANIFEST).write_text(text, encoding="utf-8")
    mode = stat.S_IMODE((folder / MANIFEST).stat().st_mode)
    for name in files:
        (folder / name).chmod(mode)  # safetensors creates files that only their owner can read


def _take_place(partial: Path, out: Path, old: Path) -> None:
    """Renames a directory. One that is there is removed only after the new one has its name."""
    if not out.exists():
        partial.rename(out)
        return
    out.rename(old)
    try:
        partial.rename(out)
    except BaseException:
        old.rename(out)
        raise
    shutil.rmtree(old)


def _files(folder: Path) -> set[str]:
    """The files in a directory and those below it, as paths from there."""
    return {each.relative_to(folder).as_posix() for each in folder.rglob("*") if not each.is_dir()}


def _listed(folder: Path) -> set[str]:
    """The files that the directory's export.json lists; none without one."""
    path = folder / MANIFEST
    try:
        return set(map(str, field(read_object(path, most_bytes=LARGEST_FILE), "files", list, path)))
    except FileNotFoundError:
        return set()
