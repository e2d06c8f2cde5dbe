"""Multiple negatives ranking in numpy float64, from its formulas with whole matrices of scores."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

Array = np.ndarray
DIRECTIONS = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
HARDNESS = (None, "in_batch_negatives", "hard_negatives", "all_negatives")


class Result(NamedTuple):
    """The loss of each row (N,), and the gradients of the weighted sum of them."""

    loss: Array
    queries: Array
    documents: list[Array]
    scale: float


class _Block(NamedTuple):
    """One direction: cell (i, j) is the score of row `left` i with row `right` j, of a row's softmax i."""

    left: Array  # (N, D)
    right: Array  # (M, D)
    raised: Array  # (N, M), added to the scale
    cells: Array  # (N, M) bool: neither left out nor the positive
    positive: bool  # whether cell (i, i) is the positive


def ranking(
    queries: Array,
    documents: list[Array],
    *,
    scale: float,
    normalize: bool,
    directions: tuple[str, ...],
    partition_mode: str = "joint",
    hardness_mode: str | None = None,
    hardness_strength: float = 0.0,
    margin: float | None = None,
    margin_strategy: str = "absolute",
    weights: Array,  # (N,)
) -> Result:
    """The gradient of a positive's score is minus the others' probabilities, which keeps its digits."""
    given = [queries, *documents]
    norms = [np.linalg.norm(x, axis=1, keepdims=True) if normalize else np.ones((len(x), 1)) for x in given]
    q, d, *more = (x / n for x, n in zip(given, norms, strict=True))
    N, columns = len(q), np.concatenate([d, *more])
    eye = np.eye(N, dtype=bool)
    own = np.tile(eye, len(documents))
    positives = own & (np.arange(len(columns)) < N)
    raised = {
        None: np.zeros_like(own),
        "in_batch_negatives": ~own,
        "hard_negatives": own & ~positives,
        "all_negatives": ~positives,
    }[hardness_mode]
    blocks = {
        "query_to_doc": _Block(q, columns, hardness_strength * raised, ~positives, True),
        "query_to_query": _Block(q, q, 0 * eye, ~eye, False),
        "doc_to_query": _Block(d, q, 0 * eye, ~eye, True),
        "doc_to_doc": _Block(d, columns, 0 * own, ~own, False),
    }
    taken = [blocks[name] for name in directions]
    positive = (q * d).sum(1)
    if margin is not None:
        unit = abs(positive) if margin_strategy == "relative" else 1.0
        most = positive + margin * unit
        taken = [x._replace(cells=x.cells & (x.left @ x.right.T <= most[:, None])) for x in taken]
    softmaxes = [taken] if partition_mode == "joint" else [[block] for block in taken]
    loss = np.zeros(N)
    gradients = {id(x): np.zeros_like(x) for x in (q, d, columns)}
    of_scale = 0.0
    for softmax in softmaxes:
        share = weights / len(softmaxes)
        copies = sum(block.positive for block in softmax)
        # exp(S - p) of all cells that are not the positive
        odds = []
        for block in softmax:
            cosines = block.left @ block.right.T
            with np.errstate(over="ignore"):
                found = np.exp((scale + block.raised) * cosines - scale * positive[:, None])
            odds.append((np.where(block.cells, found, 0), cosines))
        others = sum(x.sum(1) for x, _ in odds)
        loss += (np.log(copies) + np.log1p(others / copies)) / len(softmaxes)
        for block, (found, cosines) in zip(softmax, odds, strict=True):
            dS = share[:, None] * found / (copies + others)[:, None]
            of_scale += (dS * cosines).sum()
            gradients[id(block.left)] += scale * dS @ block.right
            gradients[id(block.right)] += scale * dS.T @ block.left
        dp = -share * others / (copies + others)
        of_scale += (dp * positive).sum()
        gradients[id(q)] += scale * dp[:, None] * d
        gradients[id(d)] += scale * dp[:, None] * q
    of_columns = np.split(gradients[id(columns)], len(documents))
    of_columns[0] = of_columns[0] + gradients[id(d)]
    found = []
    for unit, norm, g in zip((q, d, *more), norms, (gradients[id(q)], *of_columns), strict=True):
        found.append((g - unit * (unit * g).sum(1, keepdims=True)) / norm if normalize else g)
    return Result(loss, found[0], found[1:], of_scale)


def settings() -> list[tuple[tuple[str, ...], str]]:
    """All sets of directions with their partition modes."""
    found = []
    for bits in range(8):
        names = tuple(name for i, name in enumerate(DIRECTIONS) if i == 0 or bits >> (i - 1) & 1)
        found.append((names, "joint"))
        if set(names) <= {"query_to_doc", "doc_to_query"}:
            found.append((names, "per_direction"))
    return found
