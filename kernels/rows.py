"""What each row needs beside the large products: references, statistics, exact cells, gradients.

The cells that the product of the scores leaves out (targets, the private negative, a zeroed
diagonal) are few a row. Their scores are float32 inner products taken here, their softmax
and coefficients are computed in float64, and they reach the gradients through gathers.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from fastqt.kernels.launch import block, on_device
from torch import Tensor

# Row sums within exp(-40)..exp(80) lose nothing to float32's or bfloat16's range.
LEAST, MOST = tl.constexpr(4.2e-18), tl.constexpr(5.5e34)
NO_PRIVATE, PRIVATE_ROW, PRIVATE_MIX = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def private_part(matrix, partners, mix, i, d, inside, row_stride, stride, KIND: tl.constexpr):
    """Elements d of row i's negative, float32; a mix is not normalised yet."""
    own = tl.load(matrix + i * row_stride + d * stride, mask=inside, other=0.0).to(tl.float32)
    if KIND == PRIVATE_MIX:
        partner = tl.load(partners + i)
        other = tl.load(matrix + partner * row_stride + d * stride, mask=inside, other=0.0).to(tl.float32)
        return mix * own + (1 - mix) * other
    return own


@triton.jit
def references_kernel(
    queries,
    candidates,
    scale,
    target_starts,
    target_columns,
    sampled,  # (N,) float32: maxima over a sample of candidates
    zeroed,  # (N,) bool
    private,
    partners,
    target_scores,  # (targets,) float32
    private_scores,  # (N,) float32
    private_norms,  # (N,) float32, of mixes
    bases,  # (N,) float32
    references,  # (N,) float32
    mix,
    width,
    query_row_stride,
    query_stride,
    candidate_row_stride,
    candidate_stride,
    private_row_stride,
    private_stride,
    ZEROED: tl.constexpr,
    SAMPLED: tl.constexpr,
    PRIVATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program a row: scores of its exact cells, and a reference for the exponentials of all others.

    The base is the largest exact score; a row without targets has +inf, and E = 0.
    """
    i = tl.program_id(0).to(tl.int64)
    s = tl.load(scale)
    f = queries + i * query_row_stride
    first, last = tl.load(target_starts + i), tl.load(target_starts + i + 1)
    base = float("-inf")
    found = 0
    for t in range(first, last):
        at = tl.load(target_columns + t)
        dot = tl.zeros((BLOCK,), dtype=tl.float32)
        if at >= 0:
            for start in range(0, width, BLOCK):
                d = start + tl.arange(0, BLOCK)
                a = tl.load(f + d * query_stride, mask=d < width, other=0.0)
                g = candidates + at * candidate_row_stride
                b = tl.load(g + d * candidate_stride, mask=d < width, other=0.0)
                dot += a.to(tl.float32) * b.to(tl.float32)
        score = s * tl.sum(dot, 0)
        tl.store(target_scores + t, score)
        if at >= 0:
            base = tl.maximum(base, score)
            found = 1
    if ZEROED:
        base = tl.where(tl.load(zeroed + i) != 0, tl.maximum(base, 0.0), base)
    if PRIVATE != NO_PRIVATE:
        dot = tl.zeros((BLOCK,), dtype=tl.float32)
        square = tl.zeros((BLOCK,), dtype=tl.float32)
        for start in range(0, width, BLOCK):
            d = start + tl.arange(0, BLOCK)
            a = tl.load(f + d * query_stride, mask=d < width, other=0.0).to(tl.float32)
            r = private_part(
                private, partners, mix, i, d, d < width, private_row_stride, private_stride, PRIVATE
            )
            dot += a * r
            square += r * r
        norm = 1.0
        if PRIVATE == PRIVATE_MIX:
            norm = tl.maximum(tl.sqrt(tl.sum(square, 0)), 1e-12)
        score = s * tl.sum(dot, 0) / norm
        tl.store(private_scores + i, score)
        tl.store(private_norms + i, norm)
        base = tl.maximum(base, score)
    reference = base
    if SAMPLED:
        reference = tl.maximum(base, tl.load(sampled + i))
    tl.store(bases + i, base)
    tl.store(references + i, tl.where(found > 0, reference, float("inf")))


@triton.jit
def raise_references_kernel(
    bases,
    references,
    maxima,  # (blocks, rows) float32
    redo,
    rows,
    blocks,
    first_row,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The true maximum of the rows whose reference was too far off."""
    i = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row = first_row + i
    wanted = (i < rows) & (tl.load(redo + row, mask=i < rows, other=0) > 0)
    if tl.max(wanted.to(tl.int32), 0) > 0:
        highest = tl.load(bases + row, mask=wanted, other=0.0)
        for start in range(0, blocks, BLOCK):
            b = start + tl.arange(0, BLOCK)
            inside = wanted[:, None] & (b < blocks)[None, :]
            at = maxima + b.to(tl.int64)[None, :] * rows + i[:, None]
            highest = tl.maximum(highest, tl.max(tl.load(at, mask=inside, other=float("-inf")), 1))
        tl.store(references + row, highest, mask=wanted)


@triton.jit
def statistics_kernel(
    partial,  # (blocks, rows) float32: sums of E
    references,
    target_starts,
    target_columns,
    target_weights,  # (targets,) float64
    target_scores,
    zeroed,  # (N,) bool
    private_scores,
    row_weights,  # (N,) float64
    redo,  # (N,) int32: read if ONLY_REDO, else written
    logsumexp,  # (N,) float64
    mass,
    loss,
    sums,  # (N,) float64: of all exponentials, against the reference
    target_coefficients,  # (targets,) float32
    private_coefficients,  # (N,) float32
    rows,
    blocks,
    first_row,
    ZEROED: tl.constexpr,
    PRIVATE: tl.constexpr,
    ONLY_REDO: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Losses of rows, and dL/dS at their exact cells: w (rho p - T) without its cancellation."""
    i = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row = first_row + i
    inside = i < rows
    if ONLY_REDO:
        inside = inside & (tl.load(redo + row, mask=inside, other=0) > 0)
    if tl.max(inside.to(tl.int32), 0) > 0:
        others = tl.zeros((BLOCK_ROWS,), dtype=tl.float64)
        for start in range(0, blocks, BLOCK):
            b = start + tl.arange(0, BLOCK)
            at = partial + b.to(tl.int64)[None, :] * rows + i[:, None]
            part = tl.load(at, mask=inside[:, None] & (b < blocks)[None, :], other=0.0)
            others += tl.sum(part.to(tl.float64), 1)
        reference = tl.load(references + row, mask=inside, other=0.0).to(tl.float64)
        if ZEROED:
            own = tl.load(zeroed + row, mask=inside, other=0) != 0
            others += tl.where(own, tl.exp(-reference), 0.0)
        private = tl.zeros((BLOCK_ROWS,), dtype=tl.float64)
        if PRIVATE != NO_PRIVATE:
            private_score = tl.load(private_scores + row, mask=inside, other=0.0).to(tl.float64)
            private = tl.exp(private_score - reference)
            others += private

        first = tl.load(target_starts + row, mask=inside, other=0)
        count = tl.load(target_starts + row + 1, mask=inside, other=0) - first
        most = tl.max(count, 0)
        rho = tl.zeros((BLOCK_ROWS,), dtype=tl.float64)
        linear = tl.zeros((BLOCK_ROWS,), dtype=tl.float64)
        targets = tl.zeros((BLOCK_ROWS,), dtype=tl.float64)
        for k in range(0, most):
            given = inside & (k < count)
            given = given & (tl.load(target_columns + first + k, mask=given, other=-1) >= 0)
            T = tl.load(target_weights + first + k, mask=given, other=0.0)
            score = tl.load(target_scores + first + k, mask=given, other=0.0).to(tl.float64)
            rho += T
            linear += T * (tl.log(tl.where(given, T, 1.0)) - score)
            targets += tl.where(given, tl.exp(score - reference), 0.0)
        total = others + targets
        lse = reference + tl.log(total)
        row_loss = tl.where(rho > 0, rho * lse + linear, 0.0)
        w = tl.load(row_weights + row, mask=inside, other=0.0)
        for k in range(0, most):
            given = inside & (k < count)
            given = given & (tl.load(target_columns + first + k, mask=given, other=-1) >= 0)
            T = tl.load(target_weights + first + k, mask=given, other=0.0)
            score = tl.load(target_scores + first + k, mask=given, other=0.0).to(tl.float64)
            e = tl.where(given, tl.exp(score - reference), 0.0)
            c = w * ((rho - T) * e - T * (others + (targets - e))) / total
            c = tl.where(given, c, 0.0)
            tl.store(target_coefficients + first + k, c.to(tl.float32), mask=inside & (k < count))
        if PRIVATE != NO_PRIVATE:
            c = tl.where(rho > 0, w * rho * private / total, 0.0)
            tl.store(private_coefficients + row, c.to(tl.float32), mask=inside)
        tl.store(logsumexp + row, lse, mask=inside)
        tl.store(mass + row, rho, mask=inside)
        tl.store(loss + row, row_loss, mask=inside)
        tl.store(sums + row, total, mask=inside)
        if not ONLY_REDO:
            sound = ((total > LEAST) & (total < MOST)) | (rho == 0)
            tl.store(redo + row, tl.where(sound, 0, 1), mask=inside)


@triton.jit
def finish_queries_kernel(
    queries,
    candidates,
    scale,
    product,  # (rows, D) float32: E G
    sums,
    mass,
    row_weights,
    weight_norm,  # () float64
    target_starts,
    target_columns,
    target_coefficients,
    private,
    partners,
    private_norms,
    private_coefficients,
    query_gradient,  # (N, D)
    weighted_queries,  # (rows, D)
    private_gradient,  # (N, D)
    scale_gradient,  # (N,) float32
    mix,
    gain,
    width,
    first_row,
    query_row_stride,
    query_stride,
    candidate_row_stride,
    candidate_stride,
    private_row_stride,
    private_stride,
    QUERIES: tl.constexpr,
    WEIGHTED: tl.constexpr,
    PRIVATE: tl.constexpr,
    PRIVATE_GRADIENT: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program a row: its gradient, and the row as the candidates' product takes it.

    dF_i = s (w rho / l (E G)_i + sum over exact cells of c g), and the weighted row is
    gain * rho w / (l weight_norm) f_i, whose size is that of f_i whatever the weights are.
    """
    at_row = tl.program_id(0).to(tl.int64)
    i = first_row + at_row
    s = tl.load(scale)
    w, rho, total = tl.load(row_weights + i), tl.load(mass + i), tl.load(sums + i)
    share = tl.where(rho > 0, rho / total, 0.0)
    factor = (w * share).to(tl.float32)
    relative = (gain * (w / tl.load(weight_norm)) * share).to(tl.float32)
    first, last = tl.load(target_starts + i), tl.load(target_starts + i + 1)
    by_scale = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, width, BLOCK):
        d = start + tl.arange(0, BLOCK)
        inside = d < width
        f = tl.load(queries + i * query_row_stride + d * query_stride, mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            at = weighted_queries + at_row * width + d
            tl.store(at, (relative * f).to(weighted_queries.dtype.element_ty), mask=inside)
        if PRIVATE != NO_PRIVATE:
            c = tl.load(private_coefficients + i)
        if PRIVATE_GRADIENT:
            at = private_gradient + i * width + d
            tl.store(at, (s * c * f).to(private_gradient.dtype.element_ty), mask=inside)
        if QUERIES or SCALE:
            gradient = factor * tl.load(product + at_row * width + d, mask=inside, other=0.0)
            for t in range(first, last):
                column = tl.load(target_columns + t)
                if column >= 0:
                    g = candidates + column * candidate_row_stride + d * candidate_stride
                    coefficient = tl.load(target_coefficients + t)
                    gradient += coefficient * tl.load(g, mask=inside, other=0.0).to(tl.float32)
            if PRIVATE != NO_PRIVATE:
                r = private_part(
                    private, partners, mix, i, d, inside, private_row_stride, private_stride, PRIVATE
                )
                gradient += c / tl.load(private_norms + i) * r
            by_scale += f * gradient
            if QUERIES:
                at = query_gradient + i * width + d
                tl.store(at, (s * gradient).to(query_gradient.dtype.element_ty), mask=inside)
    if SCALE:
        tl.store(scale_gradient + i, tl.sum(by_scale, 0))


@triton.jit
def finish_candidates_kernel(
    queries,
    scale,
    product,  # (columns, D) float32: the sum of Eᵀ F over chunks, F weighted
    weight_norm,
    column_starts,  # (columns + 1,) int64
    column_targets,  # (targets,) int64: their places in the order of rows
    target_rows,  # (targets,) int64
    target_coefficients,
    candidate_gradient,  # (columns, D)
    gain,
    width,
    query_row_stride,
    query_stride,
    TARGETS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program a candidate: dG_j = s (weight_norm / gain product_j + sum over its targets of c f)."""
    j = tl.program_id(0).to(tl.int64)
    s = tl.load(scale)
    factor = (tl.load(weight_norm) / gain).to(tl.float32)
    if TARGETS:
        first, last = tl.load(column_starts + j), tl.load(column_starts + j + 1)
    for start in range(0, width, BLOCK):
        d = start + tl.arange(0, BLOCK)
        inside = d < width
        gradient = factor * tl.load(product + j * width + d, mask=inside, other=0.0)
        if TARGETS:
            for k in range(first, last):
                t = tl.load(column_targets + k)
                f = queries + tl.load(target_rows + t) * query_row_stride + d * query_stride
                coefficient = tl.load(target_coefficients + t)
                gradient += coefficient * tl.load(f, mask=inside, other=0.0).to(tl.float32)
        at = candidate_gradient + j * width + d
        tl.store(at, (s * gradient).to(candidate_gradient.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class PrivateNegatives:
    """One negative a row: `matrix`'s, or mix * matrix[i] + (1 - mix) * matrix[partners[i]] at norm 1."""

    matrix: Tensor  # (N, D)
    scores: Tensor  # (N,) float32, these three found on the way
    norms: Tensor
    coefficients: Tensor
    partners: Tensor | None = None  # (N,) int64
    mix: float = 1.0


@dataclass(frozen=True)
class ExactCells:
    """The cells that are computed one by one: targets in the order of rows, and the private negatives."""

    starts: Tensor  # (N + 1,) int64
    columns: Tensor  # (targets,) int64, -1 where there is none
    weights: Tensor  # (targets,) float64
    scores: Tensor  # (targets,) float32, found on the way
    coefficients: Tensor  # (targets,) float32, found on the way: dL/dS
    zeroed: Tensor | None  # (N,) bool: rows whose cell on the diagonal has score 0
    private: PrivateNegatives | None


@dataclass(frozen=True)
class RowState:
    """What becomes known of each row, all (N,)."""

    weights: Tensor  # float64: how much its loss counts
    bases: Tensor  # float32: the largest score among its exact cells
    references: Tensor  # float32
    redo: Tensor  # int32: whether the reference was too far off
    sums: Tensor  # float64: of the exponentials against the reference
    logsumexp: Tensor  # float64, as the following
    mass: Tensor
    loss: Tensor


def references(
    queries: Tensor,
    candidates: Tensor,
    scale: Tensor,
    cells: ExactCells,
    state: RowState,
    sampled: Tensor | None,  # (N,) float32: maxima over a sample of candidates
) -> None:
    """Scores of the exact cells, and from them the rows' references."""
    N, D = queries.shape
    matrix, partners, scores, norms, _ = _private(cells)
    with on_device(queries):
        references_kernel[(N,)](
            *(
                queries,
                candidates,
                scale,
                cells.starts,
                cells.columns,
                sampled,
                cells.zeroed,
                matrix,
                partners,
            ),
            *(cells.scores, scores, norms, state.bases, state.references, _mix(cells)),
            *(D, *queries.stride(), *candidates.stride(), *_strides(matrix)),
            ZEROED=cells.zeroed is not None,
            SAMPLED=sampled is not None,
            PRIVATE=_kind(cells),
            BLOCK=block(D, 1024),
            num_warps=4,
        )


def raise_references(state: RowState, maxima: Tensor, first_row: int) -> None:
    blocks, rows = maxima.shape
    with on_device(maxima):
        raise_references_kernel[(triton.cdiv(rows, ROWS),)](
            *(state.bases, state.references, maxima, state.redo, rows, blocks, first_row),
            BLOCK_ROWS=ROWS,
            BLOCK=block(blocks, 128),
            num_warps=4,
        )


def statistics(
    partial: Tensor, cells: ExactCells, state: RowState, first_row: int, *, only_redo: bool
) -> None:
    """Everything that is known of some rows once the sums of E are there."""
    blocks, rows = partial.shape
    _, _, scores, _, coefficients = _private(cells)
    with on_device(partial):
        statistics_kernel[(triton.cdiv(rows, ROWS),)](
            *(
                partial,
                state.references,
                cells.starts,
                cells.columns,
                cells.weights,
                cells.scores,
                cells.zeroed,
                scores,
            ),
            *(state.weights, state.redo, state.logsumexp, state.mass, state.loss, state.sums),
            *(cells.coefficients, coefficients, rows, blocks, first_row),
            ZEROED=cells.zeroed is not None,
            PRIVATE=_kind(cells),
            ONLY_REDO=only_redo,
            BLOCK_ROWS=ROWS,
            BLOCK=block(blocks, 128),
            num_warps=4,
        )


def finish_queries(
    queries: Tensor,
    candidates: Tensor,
    scale: Tensor,
    product: Tensor | None,  # (rows, D) float32: E G
    cells: ExactCells,
    state: RowState,
    weight_norm: Tensor,  # () float64
    gain: float,
    first_row: int,
    rows: int,
    *,
    query_gradient: Tensor | None,  # (N, D), contiguous as the following
    weighted_queries: Tensor | None,  # (rows, D)
    private_gradient: Tensor | None,  # (N, D)
    scale_gradient: Tensor | None,  # (N,) float32
) -> None:
    D = queries.shape[1]
    matrix, partners, _, norms, coefficients = _private(cells)
    with on_device(queries):
        finish_queries_kernel[(rows,)](
            *(queries, candidates, scale, product, state.sums, state.mass, state.weights, weight_norm),
            *(cells.starts, cells.columns, cells.coefficients, matrix, partners, norms, coefficients),
            *(query_gradient, weighted_queries, private_gradient, scale_gradient, _mix(cells), gain),
            *(D, first_row, *queries.stride(), *candidates.stride(), *_strides(matrix)),
            QUERIES=query_gradient is not None,
            WEIGHTED=weighted_queries is not None,
            PRIVATE=_kind(cells),
            PRIVATE_GRADIENT=private_gradient is not None,
            SCALE=scale_gradient is not None,
            BLOCK=block(D, 1024),
            num_warps=4,
        )


def finish_candidates(
    queries: Tensor,
    scale: Tensor,
    product: Tensor,  # (columns, D) float32: Eᵀ F, F weighted
    weight_norm: Tensor,
    gain: float,
    candidate_gradient: Tensor,  # (columns, D)
    *,
    by_column: tuple[Tensor, Tensor, Tensor] | None,  # starts, targets, and the targets' rows
    coefficients: Tensor,
) -> None:
    columns, D = product.shape
    with on_device(queries):
        finish_candidates_kernel[(columns,)](
            *(queries, scale, product, weight_norm, *(by_column or (None,) * 3), coefficients),
            *(candidate_gradient, gain, D, *queries.stride()),
            TARGETS=by_column is not None,
            BLOCK=block(D, 1024),
            num_warps=4,
        )


ROWS = 8  # of a program that reads sums of blocks of columns


def _private(cells: ExactCells) -> tuple[Tensor | None, ...]:
    p = cells.private
    return (None,) * 5 if p is None else (p.matrix, p.partners, p.scores, p.norms, p.coefficients)


def _kind(cells: ExactCells) -> tl.constexpr:
    if cells.private is None:
        return NO_PRIVATE
    return PRIVATE_ROW if cells.private.partners is None else PRIVATE_MIX


def _mix(cells: ExactCells) -> float:
    return 1.0 if cells.private is None else cells.private.mix


def _strides(matrix: Tensor | None) -> tuple[int, ...]:
    return (0, 0) if matrix is None else matrix.stride()
