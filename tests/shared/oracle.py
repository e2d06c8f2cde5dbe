"""The contrastive loss and its gradients by their definitions, in numpy and float64, a row at a time.

Shares no code with fastqt: targets are written out as matrices by loops over their definition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def window(
    N: int,
    M: int,
    offsets: Sequence[int],
    weights: Sequence[float] | None = None,
    normalize: bool = True,
    document_ids: Sequence[int] | None = None,
) -> Array:
    T = np.zeros((N, M))
    for i in range(N):
        for k, offset in enumerate(offsets):
            j = i + offset
            if 0 <= j < M and (document_ids is None or document_ids[i] == document_ids[j]):
                T[i, j] = 1.0 if weights is None else weights[k]
        if normalize and T[i].sum() > 0:
            T[i] /= T[i].sum()
    return T


def smoothed(T: Array, smoothing: float, normalize: bool = True) -> Array:
    T = T + smoothing
    return T / T.sum(1, keepdims=True) if normalize else T


@dataclass
class Result:
    loss: Array  # (N,)
    queries: Array
    candidates: Array
    negatives: Array | None
    row_negatives: Array | None
    scale: float
    bias: Array  # (M,)
    row_scores: Array | None = None
    # For the gradient of each embedding the sum of the absolute values of its terms. Terms may cancel each
    # other, but their rounding errors do not.
    magnitudes: dict[str, Array] = field(default_factory=dict)


def contrastive(
    F: Array,
    G: Array,
    T: Array,
    *,
    diagonal: str = "zero",
    scale: float = 1.0,
    negatives: Array | None = None,
    row_negatives: Array | None = None,  # (N, D) or (N, K, D)
    row_scores: Array | None = None,  # (N,) or (N, K)
    query_groups: Sequence[int] | None = None,
    candidate_groups: Sequence[int] | None = None,
    mask: NDArray[np.bool_] | None = None,
    negatives_mask: NDArray[np.bool_] | None = None,
    bias: Array | float = 0.0,
    link: str = "softmax",
    similarity: str = "dot",
    row_weights: Array | None = None,
    margin: float | None = None,  # of false negatives
    margin_strategy: str = "absolute",
    thresholds: Array | None = None,  # (N,), in place of those that follow from a margin
) -> Result:
    """The losses of the rows, and the gradients of sum_i row_weights_i loss_i (by default of the mean)."""
    N, M = T.shape
    w = np.full(N, 1 / N) if row_weights is None else row_weights
    K = 0 if negatives is None else len(negatives)
    loss = np.zeros(N)
    dF, dG, ds, db = np.zeros_like(F), np.zeros_like(G), 0.0, np.zeros(M)
    dN = None if negatives is None else np.zeros_like(negatives)
    dR = None if row_negatives is None else np.zeros_like(row_negatives)
    dA = None if row_scores is None else np.zeros_like(row_scores)
    sizes = {"queries": np.zeros_like(F), "candidates": np.zeros_like(G)}
    sizes |= {} if dN is None else {"negatives": np.zeros_like(negatives)}
    sizes |= {} if dR is None else {"row_negatives": np.zeros_like(row_negatives)}
    sizes |= {} if dA is None else {"row_scores": np.zeros_like(row_scores)}
    sizes |= {"scale": np.zeros(()), "bias": np.zeros(M)}
    for i in range(N):
        if link == "softmax" and not (T[i] > 0).any():
            continue
        columns = [G]
        if negatives is not None:
            columns.append(negatives)
        if row_negatives is not None:
            columns.append(row_negatives[i].reshape(-1, F.shape[1]))
        C = np.concatenate(columns)
        given = np.zeros(0) if row_scores is None else row_scores[i].reshape(-1)
        t = np.zeros(len(C) + len(given))
        t[:M] = T[i]
        if similarity == "euclidean":
            dots, of_query, of_columns = -np.square(C - F[i]).sum(1), 2 * (C - F[i]), 2 * (F[i] - C)
            sizes_of_terms = 2 * (abs(C) + abs(F[i]))
            dot_sizes = np.square(sizes_of_terms).sum(1)
        else:
            dots, of_query, of_columns = C @ F[i], C, np.broadcast_to(F[i], C.shape)
            sizes_of_terms = np.broadcast_to(abs(F[i]), C.shape)
            dot_sizes = abs(C) @ abs(F[i])
        s = np.concatenate([scale * dots, given])
        s[:M] += bias
        alive = s > -np.inf  # in the softmax
        differentiable = np.ones(len(s), dtype=bool)
        if i < M and diagonal == "zero":
            s[i], differentiable[i] = 0.0, False
        if i < M and diagonal == "exclude":
            alive[i] = False
        if margin is not None:
            below = false_negatives_threshold(dots[:M], T[i], margin, margin_strategy)
        elif thresholds is not None:
            below = thresholds[i]
        else:
            below = np.inf
        for j, similarity_of_cell in enumerate(dots):
            replaced = j == i and i < M and diagonal == "zero"
            if similarity_of_cell > below and t[j] == 0 and not replaced:
                alive[j] = False
        if negatives_mask is not None:
            alive[M : M + K] &= ~negatives_mask[i]
        for j in range(M):
            if mask is not None and mask[i, j]:
                alive[j] = False
            if query_groups is not None and query_groups[i] == candidate_groups[j] and T[i, j] == 0:
                alive[j] = False
        if link == "log_sum_exp":
            if not alive.any():
                loss[i] = -np.inf
                continue
            loss[i] = np.logaddexp.reduce(s[alive])
            c = w[i] * np.where(alive, np.exp(np.where(alive, s - loss[i], 0)), 0) * differentiable
            c_size = abs(c)
        elif link == "sigmoid":
            loss[i] = np.logaddexp(0, s)[alive].sum() - (t * s)[t > 0].sum()
            p, q = np.exp(-np.logaddexp(0, -s)), np.exp(-np.logaddexp(0, s))
            c = w[i] * ((1 - t) * p - t * q) * differentiable * alive
            c_size = abs(w[i]) * (abs(1 - t) * p + t * q) * differentiable * alive
        else:
            top = s[alive].max()
            e = np.where(alive, np.exp(np.where(alive, s, top) - top), 0.0)
            total = e.sum()
            on = t > 0
            loss[i] = (t[on] * (np.log(t[on]) + top + np.log(total) - s[on])).sum()
            c = w[i] * (t.sum() * e / total - t) * differentiable * alive
            c_size = abs(w[i]) * (t.sum() * e / total + t) * differentiable * alive
            for j in np.flatnonzero(
                t
            ):  # rho p - t = ((rho - t) e - t (total - e)) / total, which cancels less
                if differentiable[j]:
                    others = np.delete(e, j).sum()
                    c[j] = w[i] * ((t.sum() - t[j]) * e[j] - t[j] * others) / total
        if dA is not None:
            dA[i], sizes["row_scores"][i] = (x[len(C) :].reshape(dA[i].shape) for x in (c, c_size))
        c, c_size = c[: len(C)], c_size[: len(C)]
        dF[i] = scale * c @ of_query
        dC, of_size = scale * c[:, None] * of_columns, abs(scale) * c_size[:, None] * sizes_of_terms
        dG += dC[:M]
        ds += c @ dots
        db += c[:M]
        sizes["scale"] += c_size @ dot_sizes
        sizes["bias"] += c_size[:M]
        sizes["queries"][i] = abs(scale) * c_size @ (sizes_of_terms if similarity == "euclidean" else abs(C))
        sizes["candidates"] += of_size[:M]
        if dN is not None:
            dN += dC[M : M + K]
            sizes["negatives"] += of_size[M : M + K]
        if dR is not None:
            dR[i], sizes["row_negatives"][i] = (x[M + K :].reshape(dR[i].shape) for x in (dC, of_size))
    return Result(loss, dF, dG, dN, dR, ds, db, dA, sizes)


def false_negatives_threshold(similarities: Array, targets: Array, margin: float, strategy: str) -> float:
    """What the similarities of a row's other cells are compared with: that of its least similar target."""
    of_targets = [s for s, weight in zip(similarities, targets, strict=True) if weight != 0]
    if not of_targets:
        return np.inf
    lowest = min(of_targets)
    return lowest + margin if strategy == "absolute" else lowest + abs(lowest) * margin


def clear_margin(
    similarities: Array, own: Array, strategy: str, near: float, least_gap: float
) -> float | None:
    """A margin near to the one wanted from which no cell is closer than a gap; None if there is none.

    Args:
        similarities: (N, C) of all cells that may leave.
        own: (N,) those of the rows' targets, infinite in a row without any.
        strategy: of the margin.
        near: the margin that is wanted.
        least_gap: how far each similarity is from its row's threshold at least.
    """
    rows = np.isfinite(own)
    sizes = np.ones(rows.sum()) if strategy == "absolute" else np.abs(own[rows])
    if not rows.any() or not sizes.min() > 0:
        return near
    at = np.sort(((similarities[rows] - own[rows, None]) / sizes[:, None]).ravel())
    edges = np.concatenate([[at[0] - 1], at, [at[-1] + 1]])
    widths, middles = np.diff(edges), (edges[1:] + edges[:-1]) / 2
    wide = widths / 2 * sizes.min() > least_gap
    return float(min(middles[wide], key=lambda x: abs(x - near))) if wide.any() else None


def guide_scores(queries: Array, candidates: Array, normalize: bool = True) -> Array:
    """The guide's score of each query with each candidate, cell by cell."""
    scores = np.zeros((len(queries), len(candidates)))
    for i, q in enumerate(queries):
        for j, c in enumerate(candidates):
            lengths = np.sqrt(q @ q) * np.sqrt(c @ c) if normalize else 1.0
            scores[i, j] = (q @ c) / lengths
    return scores


def guide_excludes(scores: Array, thresholds: Array, T: Array | None = None) -> NDArray[np.bool_]:
    """The cells that leave: those with a score above their row's threshold, unless they are targets."""
    above = np.zeros(scores.shape, dtype=bool)
    for i, j in np.ndindex(scores.shape):
        above[i, j] = scores[i, j] > thresholds[i] and (T is None or T[i, j] == 0)
    return above


def guide_thresholds(scores: Array, margin: float, strategy: str) -> Array:
    """Of each query, from its score with the candidate of the same index."""
    own = np.array([scores[i, i] for i in range(len(scores))])
    return own - margin if strategy == "absolute" else own - np.abs(own) * margin
