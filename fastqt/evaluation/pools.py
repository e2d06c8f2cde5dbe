"""The rows of a pool nearest to others, and sentence analogies."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

ROWS = 1 << 14


def nearest_rows(
    queries: NDArray[np.floating],  # (q, d)
    pool: NDArray[np.floating],  # (n, d)
    k: int = 1,
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The k rows of a pool with the highest cosine to each query, best first; of equals the earlier.

    The pool is read 16,384 rows at a time, and may be a mapped .npy that `fastqt embed` wrote. For a corpus
    in text see `fastqt.inference.search.nearest`.

    Args:
        queries: (q, d).
        pool: (n, d).
        k: how many; fewer are returned where the pool holds fewer.

    Returns:
        Rows of the pool (q, k) and their cosines (q, k).
    """
    if k < 1 or not len(pool):
        raise ValueError(f"k: wanted from 1 to the pool's {len(pool)} rows, got {k}")
    wanted = F.normalize(_tensor(queries), dim=1)
    best, rows = wanted.new_zeros(len(wanted), 0), torch.zeros(len(wanted), 0, dtype=torch.int64)
    for begin in range(0, len(pool), ROWS):
        block = F.normalize(_tensor(pool[begin : begin + ROWS]), dim=1)
        cosines = torch.cat([best, wanted @ block.T], dim=1)
        numbers = torch.arange(begin, begin + len(block)).expand(len(wanted), -1)
        best, columns = cosines.sort(dim=1, descending=True, stable=True)
        best, columns = best[:, :k], columns[:, :k]
        rows = torch.cat([rows, numbers], dim=1).gather(1, columns)
    return rows.numpy(), best.numpy()


def analogies(
    a: NDArray[np.floating],  # (q, d)
    b: NDArray[np.floating],  # (q, d)
    c: NDArray[np.floating],  # (q, d)
    pool: NDArray[np.floating],  # (n, d)
    k: int = 1,
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """What is to C as B is to A: the rows of a pool nearest to C + B − A; A, B and C are not excluded.

    Returns:
        Rows of the pool (q, k), best first, and their cosines (q, k).
    """
    return nearest_rows(c + b - a, pool, k)


def _tensor(array: NDArray[np.floating]) -> torch.Tensor:
    return torch.from_numpy(np.array(array, dtype=np.float32))
