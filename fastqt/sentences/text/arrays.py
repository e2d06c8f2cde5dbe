"""Reads arrays that users bring: .npy files, of which nothing is ever executed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastqt.errors import InputError, one_line


def map_rows(path: str | Path) -> NDArray[np.floating[Any]]:
    """Maps the rows (n, d) of an .npy file of a floating-point type: they are read when they are used."""
    try:
        rows = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise InputError(f"no such file: {path}") from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or one_line(error)}") from error
    # numpy's parser of headers raises whatever Python's own parser and tokenizer do.
    except Exception as error:
        raise InputError(f"{path} is no .npy, or is damaged: {one_line(error)}") from error
    if not isinstance(rows, np.ndarray) or rows.ndim != 2 or rows.dtype.kind != "f" or 0 in rows.shape:
        got = f"shape {rows.shape!s:.100} of {rows.dtype!s:.100}" if hasattr(rows, "dtype") else "an .npz"
        raise InputError(f"{path}: want rows (n, d) of a floating-point type in an .npy, got {got}")
    return rows
