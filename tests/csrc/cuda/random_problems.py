"""Random small problems, and the errors of the kernels on them against the oracle.

python -m tests.csrc.cuda.random_problems LIBRARY FIRST END    # runs those of seeds FIRST .. END - 1
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from tests.csrc.cuda.host_execution import ARITHMETICS, DIAGONALS, Array, HostKernels, Small, decoded, encoded
from tests.shared import oracle

# Half a unit in the last place of the elements. A gradient may differ by a few of them: its coefficients are
# rounded once, then it is itself, and sums of rounded terms scatter. tf32 rounds only what it multiplies.
ROUNDING = {"float32": 2.0**-24, "tf32": 2.0**-11, "bfloat16": 2.0**-9, "float16": 2.0**-12}
GRADIENT = {"float32": 2e-5, "tf32": 3 * 2.0**-11, "bfloat16": 3 * 2.0**-9, "float16": 3 * 2.0**-11}
ROWS = 2e-6
# A score is rounded by half a unit of float32 at each partial sum of its D products, up or down. Where the
# partial sums grow evenly, the standard deviation of the error is sqrt(D) / 3 half units of the last sum.
SCORE = 2.0**-25
# Half of the least positive number of float16: the error of a result that is nearly 0.
SMALLEST16 = 2.0**-25


def make(seed: int) -> tuple[Small, int]:
    """A problem, and a number of blocks to compute it with."""
    rng = np.random.default_rng(seed)
    arithmetic = ARITHMETICS[seed % 4]
    large = rng.random() < 0.06
    N, M = (int(n) for n in rng.integers(1, 170 if large else 41, 2))
    D = int(rng.integers(1, 200 if large else 80))
    if rng.random() < 0.5:
        D = -(-D // 8) * 8
    mixing = rng.random() < 0.15
    if mixing or rng.random() < 0.4:
        M = max(N, M)
    diagonal = DIAGONALS[rng.integers(3)]
    T = targets(rng, N, M, diagonal)
    queries, candidates = embeddings(rng, T, D)
    starts, columns, weights = compressed(rng, T)
    given = not mixing and rng.random() < 0.2
    problem = Small(
        arithmetic,
        representable(queries, arithmetic),
        representable(candidates, arithmetic),
        starts,
        columns,
        weights,
        diagonal,
        scale=_one_of(rng, float(rng.normal() * 2), np.float32(rng.random() * 2)),
        row_negatives=representable(rng.standard_normal((N, D)), arithmetic) if given else None,
        partners=rng.integers(0, M, N) if mixing else None,
        mix=float(np.float32(rng.random())) if mixing else 1.0,
        row_weights=_one_of(rng, 1 / N, rng.normal(size=N) * 10.0 ** rng.integers(-5, 2, N)),
    )
    chosen = tuple(name for name in problem.wanted if rng.random() < 0.85)
    return replace(problem, wanted=chosen), int(rng.integers(1, 5))


def _one_of(rng: np.random.Generator, number: float, array: Array) -> float | Array:
    return number if rng.random() < 0.5 else np.asarray(array)


def targets(rng: np.random.Generator, N: int, M: int, diagonal: str) -> Array:
    kind = rng.integers(4)
    if kind == 0:
        T = oracle.window(N, M, [-2, -1, 1, 3][: rng.integers(1, 5)], normalize=rng.random() < 0.7)
    elif kind == 1:
        T = np.eye(N, M)
    elif kind == 2:
        T = np.eye(M)[rng.integers(0, M, N)] * (rng.random((N, 1)) < 0.9)
    else:
        T = np.where(rng.random((N, M)) < 0.3, rng.random((N, M)) * 3, 0)
    if diagonal != "keep":
        T = T * (1 - np.eye(N, M))
    return T


def embeddings(rng: np.random.Generator, T: Array, D: int) -> tuple[Array, Array]:
    """Random embeddings, or such whose queries are more or less close to their targets."""
    candidates = rng.standard_normal((T.shape[1], D))
    queries = rng.standard_normal((T.shape[0], D)) / np.sqrt(D) * rng.choice([0.3, 2.0])
    if rng.random() < 0.4:
        candidates /= np.linalg.norm(candidates, axis=1, keepdims=True)
        queries = rng.choice([5.0, 20.0]) * (T > 0) @ candidates + 0.1 * queries
    return queries, candidates


def compressed(rng: np.random.Generator, T: Array) -> tuple[Array, Array, Array]:
    """T as compressed rows, with entries of weight 0 at random places."""
    given = (T > 0) | (rng.random(T.shape) < 0.02)
    starts = np.concatenate([[0], given.sum(1).cumsum()]).astype(np.int64)
    rows, columns = given.nonzero()
    return starts, columns.astype(np.int64), T[rows, columns]


def representable(x: Array, arithmetic: str) -> Array:
    """Elements of an arithmetic; those of tf32 are rounded to its digits, so that the kernel need not."""
    if arithmetic != "tf32":
        return encoded(x, arithmetic)
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x1000) & np.uint32(0xFFFFE000)).view(np.float32)


def expected(p: Small) -> oracle.Result:
    N = len(p.queries)
    candidates = decoded(p.candidates, p.arithmetic)
    negatives = None if p.row_negatives is None else decoded(p.row_negatives, p.arithmetic)
    if p.partners is not None:
        negatives = p.mix * candidates[:N] + (1 - p.mix) * candidates[p.partners]
        negatives /= np.maximum(np.linalg.norm(negatives, axis=1, keepdims=True), 1e-12)
    return oracle.contrastive(
        decoded(p.queries, p.arithmetic),
        candidates,
        matrix(p),
        diagonal=p.diagonal,
        scale=float(p.scale),
        row_negatives=negatives,
        row_weights=np.broadcast_to(np.float64(p.row_weights), (N,)),
    )


def errors(p: Small, found: dict[str, Array], exact: oracle.Result) -> dict[str, float]:
    """The largest error of each result, as a multiple of what is allowed."""
    queries, candidates = decoded(p.queries, p.arithmetic), decoded(p.candidates, p.arithmetic)
    scale = abs(float(p.scale))
    by_score = SCORE * np.sqrt(queries.shape[1]) * scale * (np.abs(queries) @ np.abs(candidates).T).max()
    weights = np.abs(np.broadcast_to(np.float64(p.row_weights), exact.loss.shape))
    wanted = {"loss": exact.loss, "total": np.sum(np.float64(p.row_weights) * exact.loss)}
    allowed = {
        "loss": (ROWS + by_score) * (1 + np.abs(exact.loss).max()),
        "total": (ROWS + by_score) * (weights @ (1 + exact.loss)),
    }
    P, T = softmax(p, queries, candidates), matrix(p)
    mass = T.sum(1, keepdims=True)
    # Where the terms of a gradient cancel, the rounding of scores and coefficients remains, and that of 1 - p
    # in float64.
    doubt = by_score * mass * P * (1 - P) + ROUNDING[p.arithmetic] * np.abs(mass * P - T) + 2.0**-50 * T
    doubt *= weights[:, None]
    by_doubt = {
        "queries": scale * doubt @ np.abs(candidates),
        "candidates": scale * doubt.T @ np.abs(queries),
        "row_negatives": scale * doubt.sum(1, keepdims=True) * np.abs(queries),
        "scale": (doubt * np.abs(queries @ candidates.T)).sum(),
    }
    for name in p.wanted:
        if name in found:
            wanted[name] = np.asarray(getattr(exact, name))
            rounding = GRADIENT["float32" if name == "scale" else p.arithmetic]
            allowed[name] = rounding * np.abs(wanted[name]).max() + by_doubt[name].max()
            if p.arithmetic == "float16" and name != "scale":
                allowed[name] += SMALLEST16 * (1 + scale * weights.max() * len(weights))
    return {
        name: float(np.abs(found[name] - exact).max() / max(allowed[name], 1e-30))
        for name, exact in wanted.items()
    }


def matrix(p: Small) -> Array:
    T = np.zeros((len(p.queries), len(p.candidates)))
    for i in range(len(T)):
        for n in range(p.starts[i], p.starts[i + 1]):
            T[i, p.columns[n]] += p.weights[n]
    return T


def softmax(p: Small, queries: Array, candidates: Array) -> Array:
    """P (N, M) of a softmax without the row negatives."""
    scores = float(p.scale) * queries @ candidates.T
    own = np.arange(min(scores.shape))
    if p.diagonal != "keep":
        scores[own, own] = 0 if p.diagonal == "zero" else -np.inf
    e = np.exp(scores - np.maximum(scores.max(1, keepdims=True), -1e30))
    return e / np.maximum(e.sum(1, keepdims=True), 1e-300)


def main() -> None:
    kernels = HostKernels(Path(sys.argv[1]))
    failures = []
    for seed in range(int(sys.argv[2]), int(sys.argv[3])):
        problem, blocks = make(seed)
        found = errors(problem, kernels.run(problem, blocks=blocks, seed=seed), expected(problem))
        worst = max(found.values())
        if not worst <= 1:
            failures.append(f"seed {seed}, {problem.arithmetic}, blocks {blocks}: {found}")
    print("\n".join(failures) or "all within bounds")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
