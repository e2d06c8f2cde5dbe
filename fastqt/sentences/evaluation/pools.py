"""Nearest rows of a pool of vectors, and sentence analogies."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fastqt.sentences.inference.best import best_products, blocks, unit_rows


def nearest_rows(
    queries: NDArray[np.floating], pool: NDArray[np.floating], k: int = 1
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Finds the k rows of a pool with the highest cosine to each query.

    The pool is read in blocks of 8,192 rows, so it may be a memory-mapped .npy that `fastqt embed` wrote. To
    search a text file, see `fastqt.sentences.inference.search.nearest`.

    Args:
        queries: (q, d).
        pool: (n, d).
        k: number of rows for each query.

    Returns:
        The row numbers (q, k') and their cosines (q, k'), best first, with k' = min(k, n). Among equal
        cosines, the earlier row comes first.

    Raises:
        ValueError: k < 1, or the pool is empty.

    Example:
        >>> import numpy as np
        >>> from fastqt.sentences.evaluation import nearest_rows
        >>> pool = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
        >>> rows, found = nearest_rows(np.array([[2.0, 0.1]]), pool, k=2)
        >>> rows.tolist(), np.round(found.astype(float), 2).tolist()
        ([[0, 2]], [[1.0, 0.74]])
    """
    if k < 1 or not len(pool):
        raise ValueError(f"k: want from 1 to the pool's {len(pool)} rows, got {k}")
    parts = (unit_rows(pool[part]) for part in blocks(len(pool)))
    cosines, rows = best_products(unit_rows(queries), parts, k).results()
    return rows, cosines


def analogies(
    a: NDArray[np.floating],  # (q, d)
    b: NDArray[np.floating],  # (q, d)
    c: NDArray[np.floating],  # (q, d)
    pool: NDArray[np.floating],  # (n, d)
    k: int = 1,
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Answers "A is to B as C is to …" by the rows of a pool that are nearest to C + B − A.

    Rows that equal A, B or C are not excluded.

    Args:
        a, b, c: (q, d), the vectors of A, B and C in each question.
        pool, k: as of `nearest_rows`, and so are results and errors.

    Example:
        >>> import numpy as np
        >>> from fastqt.sentences.evaluation import analogies
        >>> pool = np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [-1.0, 1.0, 1.0]])
        >>> rows, _ = analogies(pool[:1], pool[1:2], pool[2:3], pool)
        >>> rows.tolist()
        [[3]]
    """
    return nearest_rows(c + b - a, pool, k)
