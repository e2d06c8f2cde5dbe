"""Hard negatives: documents that a model finds near to a query, and that are no positives of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastqt.errors import InputError
from fastqt.sentences.inference.best import best_products, blocks, unit_rows
from fastqt.sentences.options.inference import MineOptions

QUERIES = 1024  # that are searched at a time
TIE = 1e-6  # by which equal cosines may differ: each product rounds in an order of its own


class Negatives(NamedTuple):
    """The negatives of Q queries, nearest first."""

    rows: NDArray[np.int64]  # (Q, n) of the documents; -1 where no more were found
    cosines: NDArray[np.float32]  # (Q, n) of the query with them; -inf where no more were found


def mine(
    queries: NDArray[np.floating],
    documents: NDArray[np.floating],
    positives: Sequence[Sequence[int]],
    options: MineOptions | None = None,
) -> Negatives:
    """Hard negatives of queries: near documents that are no positives of them, by exact search.

    A margin is compared with the lowest cosine that a query has with its positives. Positives are refused
    after `range_max` candidates were taken, and the first `range_min` are passed over after everything else,
    as in sentence-transformers. On the same vectors the negatives are those of its `mine_hard_negatives`;
    random ones are drawn by another generator.

    Args:
        queries: (Q, D); no two rows should be the same text.
        documents: (M, D); the positives are among them.
        positives: the rows of the positives in `documents`, at least one for each query.
        options: which candidates become negatives.

    Returns:
        `options.negatives` for each query, or fewer where the candidates are not enough.

    Raises:
        ValueError: the shapes do not fit each other, or a query has no positive.
        InputError: an option is out of its range.

    Example:
        >>> import numpy as np
        >>> from fastqt.sentences.inference.mine import MineOptions, mine
        >>> documents = np.array([[1.0, 0.0], [1.0, 0.1], [1.0, 0.5], [0.0, 1.0]])
        >>> mine(documents[:1], documents, [[0]], MineOptions(negatives=2)).rows.tolist()
        [[1, 2]]
        >>> mine(documents[:1], documents, [[0]], MineOptions(negatives=2, max_score=0.9)).rows.tolist()
        [[2, 3]]

    Source: Moreira et al. (arXiv:2407.15831) for margins.
    """
    options = options or MineOptions()
    _check(queries, documents, positives)
    depth = options.depth(max(map(len, positives), default=0))
    most = max(map(len, positives), default=0)
    generator = np.random.default_rng(options.seed)

    parts = [
        Negatives(np.zeros((0, options.negatives), np.int64), np.zeros((0, options.negatives), np.float32))
    ]
    units = unit_rows(documents)
    for asked in blocks(len(queries), QUERIES):
        block = unit_rows(queries[asked])
        scores, rows = best_products(
            block, (units[part] for part in blocks(len(units))), depth + most
        ).results()
        cosines = scores.copy()
        for query, relevant in enumerate(positives[asked]):
            pairs = (block[query] @ units[list(relevant)].T).numpy()
            _refuse(cosines[query], rows[query], relevant, float(pairs.min()), options)
        parts.append(_chosen(cosines, rows, depth, options, generator))
    return Negatives(*(np.concatenate(each) for each in zip(*parts, strict=True)))


def _check(
    queries: NDArray[np.floating], documents: NDArray[np.floating], positives: Sequence[Sequence[int]]
) -> None:
    if queries.ndim != 2 or documents.ndim != 2 or queries.shape[1] != documents.shape[1]:
        raise ValueError(
            f"documents: want vectors (M, D) as wide as the queries, {queries.shape}, got {documents.shape}"
        )
    for name, vectors in (("queries", queries), ("documents", documents)):
        if not np.isfinite(vectors).all():
            raise InputError(f"{name}: want finite vectors, got NaN or infinity")
    if len(positives) != len(queries):
        raise ValueError(f"positives: want rows for each of {len(queries)} queries, got {len(positives)}")
    for query, relevant in enumerate(positives):
        if not len(relevant) or not all(0 <= row < len(documents) for row in relevant):
            raise ValueError(
                f"positives: want rows from 0 to {len(documents) - 1} for query {query}, got {list(relevant)}"
            )


def _refuse(
    cosines: NDArray[np.float32],  # (n,) in place: -inf where a candidate is refused
    rows: NDArray[np.int64],  # (n,)
    positives: Sequence[int],
    lowest: float,  # cosine with a positive
    options: MineOptions,
) -> None:
    refused = np.isin(rows, positives)
    if options.absolute_margin is not None:
        refused |= cosines > lowest - options.absolute_margin + TIE
    if options.relative_margin is not None:
        refused |= cosines > lowest - abs(lowest) * options.relative_margin + TIE
    if options.max_score is not None:
        refused |= cosines > options.max_score + TIE
    if options.min_score is not None:
        refused |= cosines < options.min_score - TIE
    cosines[refused] = -np.inf


def _chosen(
    cosines: NDArray[np.float32],  # (Q, n), -inf where a candidate is refused
    rows: NDArray[np.int64],  # (Q, n)
    depth: int,
    options: MineOptions,
    generator: np.random.Generator,
) -> Negatives:
    """The negatives among candidates: refused ones go to the end, then ranks count."""
    order = np.argsort(-cosines, axis=1, kind="stable")[:, options.range_min : depth]
    cosines, rows = np.take_along_axis(cosines, order, axis=1), np.take_along_axis(rows, order, axis=1)

    if options.sampling == "random":
        keys = np.where(np.isfinite(cosines), generator.random(cosines.shape), np.inf)
        drawn = np.sort(np.argsort(keys, axis=1)[:, : options.negatives], axis=1)
        cosines, rows = np.take_along_axis(cosines, drawn, axis=1), np.take_along_axis(rows, drawn, axis=1)

    wanted = options.negatives
    missing = max(wanted - cosines.shape[1], 0)
    cosines = np.pad(cosines[:, :wanted], ((0, 0), (0, missing)), constant_values=-np.inf)
    rows = np.pad(rows[:, :wanted], ((0, 0), (0, missing)), constant_values=-1)
    return Negatives(np.where(np.isfinite(cosines), rows, -1), cosines)
