"""The beginning of an index file, which is an index of faiss: `faiss.read_index` reads the file."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastqt.errors import InputError
from fastqt.integrations._libraries import load_library

ID_BYTES = 8  # of a row's number in a list
INNER_PRODUCT = 0  # as faiss numbers metrics
# Of an IndexFlatIP: its kind, width and rows, two unused numbers, whether it is trained, the metric, and the
# size of the vectors in units of four bytes.
FLAT = struct.Struct("<4siqqq?iQ")
UNUSED = 1 << 20
LISTS = b"ilar"  # begins the lists of an IndexIVFFlat


def flat_header(rows: int, width: int) -> bytes:
    """What stands in front of vectors (rows, width) in a flat index; it needs no faiss."""
    return FLAT.pack(b"IxFI", width, rows, UNUSED, UNUSED, True, INNER_PRODUCT, rows * width)


def lists_header(centroids: NDArray[np.float32], sizes: NDArray[np.int64]) -> bytes:
    """What stands in front of the lists of an index with these centroids (lists, width) and sizes (lists,).

    Of each list there are the vectors of its rows, and then the rows' numbers, int64.
    """
    faiss, (count, width) = import_faiss(), centroids.shape
    quantizer = faiss.IndexFlatIP(width)
    quantizer.add(np.ascontiguousarray(centroids))
    index = faiss.IndexIVFFlat(quantizer, width, count, faiss.METRIC_INNER_PRODUCT)
    index.ntotal = int(sizes.sum())
    empty: bytes = faiss.serialize_index(index).tobytes()
    about = struct.pack("<QQ4sQ", count, 4 * width, b"full", count)
    return empty[: empty.rindex(LISTS)] + LISTS + about + sizes.astype("<u8").tobytes()


def import_faiss() -> Any:
    """The faiss library, or InputError where it is not installed or too old."""
    try:
        return load_library("faiss")
    except ImportError as error:
        raise InputError(f"index: for ivf {error}") from error
