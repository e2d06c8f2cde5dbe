"""Word vectors as an .npy beside a table of their words, of which the wanted rows alone become memory."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import numpy as np

from fastqt.errors import InputError, one_line
from fastqt.sentences.text.limits import check_bytes
from fastqt.sentences.text.npz import Wanted, map_npy
from fastqt.sentences.text.tables import Columns, read_rows
from fastqt.sentences.text.vectors.rows import WordVectorRows, finite

WANTED = Wanted("fiu", 2)


def is_mapped(path: str | Path) -> bool:
    """Whether a path is that of an .npy or of a folder."""
    return Path(path).suffix == ".npy" or Path(path).is_dir()


def files_of(path: str | Path) -> tuple[Path, Path]:
    """The .npy of vectors and the .parquet of their words, by the folder that has one of each or the .npy."""
    path = Path(path)
    folder, array = (path, None) if path.is_dir() else (path.parent, path)
    return array or _only(folder, ".npy", path), _only(folder, ".parquet", path)


def _only(folder: Path, ending: str, path: Path) -> Path:
    try:
        files = sorted(folder.glob(f"*{ending}"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    if len(files) != 1:
        names = one_line(", ".join(each.name for each in files)) or "none"
        what = "of vectors" if ending == ".npy" else "of their words"
        raise InputError(f"{path}: want one {ending} {what} in {folder}, got {names}")
    return files[0]


def width_of(path: str | Path) -> int:
    """The width of the vectors, from the header of their file."""
    array, _ = files_of(path)
    return int(map_npy(array, WANTED).shape[1])


def read(path: str | Path, wanted: Collection[str] | None) -> WordVectorRows:
    """Reads what `fastqt.sentences.text.vectors.read_vectors` says."""
    array, index = files_of(path)
    matrix = map_npy(array, WANTED)
    words = [word for rows in read_rows(str(index), Columns()) for word in rows.texts]
    if len(words) != len(matrix):
        raise InputError(
            f"{index}: want {len(matrix)} words for as many rows of {array.name}, got {len(words)}"
        )
    kept = np.arange(len(words))
    if wanted is not None:
        kept = np.array([row for row, word in enumerate(words) if word in wanted], dtype=np.int64)
        words = [words[row] for row in kept]
    check_bytes(len(kept) * matrix.shape[1] * 4, str(array))
    vectors = np.empty((len(kept), matrix.shape[1]), dtype=np.float32)
    with np.errstate(over="ignore"):
        vectors[:] = matrix[kept]
    return WordVectorRows(words, finite(vectors, array), None)
