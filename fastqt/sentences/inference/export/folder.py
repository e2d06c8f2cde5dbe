"""Writes a whole directory, or nothing, after it was checked that its vectors are those of the model."""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import shutil
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from fastqt.errors import InputError
from fastqt.sentences.inference.encoder import SentenceEncoder
from fastqt.sentences.json_text import field, read_object, to_json
from fastqt.sentences.runs.files import PARTIAL, sync
from fastqt.sentences.text import Vocabulary

MANIFEST = "export.json"  # what an exported directory holds; by it --overwrite knows such a directory
LARGEST_FILE = 1 << 20  # bytes of an export.json
TOLERANCE = 1e-5  # of a vector's elements, at norm 1: several roundings of float32 in another order of sums
WORDS = 40  # of the vocabulary that the texts are made of
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # Linux's own numbers


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
    read other files that the user makes. They are on the disk before the directory gets its name. On Linux an
    earlier directory and the new one exchange their names in one step, so after a crash at any moment `out`
    is the one or the other. Elsewhere, and on file systems that cannot exchange names, `out` does not exist
    between two renames. What a killed process has left ends in `.partial` or, between these, in `.old`.
    """
    out = out.resolve()
    partial = out.with_name(f"{out.name[:40]}.{secrets.token_hex(4)}{PARTIAL}")
    try:
        partial.mkdir()
        yield partial
        _finish(partial, about)
        _take_place(partial, out)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError) and str(error.filename).startswith(str(partial)):
            error.filename = str(error.filename).replace(str(partial), str(out))
        raise


def _finish(folder: Path, about: dict[str, object]) -> None:
    """Writes export.json, and waits until all is on the disk."""
    files = sorted({*_files(folder), MANIFEST})
    text = to_json({**about, "files": files}, indent=2) + "\n"
    (folder / MANIFEST).write_text(text, encoding="utf-8")
    mode = stat.S_IMODE((folder / MANIFEST).stat().st_mode)
    for name in files:
        (folder / name).chmod(mode)  # safetensors creates files that only their owner can read
    for path in (*folder.rglob("*"), folder):
        sync(path)


def _take_place(partial: Path, out: Path) -> None:
    """Gives a directory its name. One that is there is removed only after the new one has its name."""
    old: Path | None = None
    if out.exists():
        check_folder(out, overwrite=True)  # again: the export has taken a while
        old = partial
        if not _exchange(partial, out):
            old = partial.with_suffix(".old")
            out.rename(old)
    if old is not partial:
        try:
            partial.rename(out)
        except BaseException:
            if old is not None:
                old.rename(out)
            raise
    sync(out.parent)
    if old is not None:
        shutil.rmtree(old)


def _exchange(one: Path, other: Path) -> bool:
    """Exchanges the names of two directories in one step; False where that cannot be done."""
    if sys.platform != "linux":
        return False
    rename = getattr(ctypes.CDLL(None), "renameat2", None)  # which Python's own library does not have
    directories = (AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other))
    return rename is not None and rename(*directories, RENAME_EXCHANGE) == 0


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


def probes(encoder: SentenceEncoder) -> list[str]:
    """Texts of several lengths: words of the vocabulary, unknown ones, and more than the model keeps."""
    vocabulary = cast("Vocabulary", encoder.vocabulary)
    special = set(vocabulary.special_ids())
    known = sorted(word for word, number in vocabulary.tokenizer.get_vocab().items() if number not in special)
    words = known[:: max(1, len(known) // WORDS)]
    length = vocabulary.max_length + 3
    too_long = " ".join((words * length)[:length])
    return [words[-1], " ".join(words[:5]), "œuvre qwxyz", f"{words[0]} qwxyz {words[-1]} .", too_long]


def check_vectors(
    encoder: SentenceEncoder,
    encode: Callable[[Sequence[str]], NDArray[Any]],
    *,
    normalize: bool,
    format: str,
) -> None:
    """Compares the vectors of an export with those of the run: of all probes together, and of one alone."""
    texts = probes(encoder)
    wanted = encoder.encode(texts, normalize=normalize)
    vectors = np.concatenate([encode(texts), encode(texts[1:2])])
    expected = np.concatenate([wanted, wanted[1:2]])

    if vectors.shape != expected.shape:
        raise InputError(f"format: {format} gives vectors of shape {vectors.shape}, want {expected.shape}")
    largest = max(1.0, float(np.abs(expected).max()))
    error = float(np.abs(vectors - expected).max())
    if not error <= TOLERANCE * largest:
        raise InputError(
            f"format: the vectors in {format} differ from those of this model by {error:.1e}, want at most "
            f"{TOLERANCE * largest:.0e}: the libraries compute this encoder differently"
        )
