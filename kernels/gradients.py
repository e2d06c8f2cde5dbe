"""Epilogues of the gradients' products: they apply the factors of rows and add the exact cells."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fastqt.kernels.cells import NO_ROW_NEGATIVE, ByColumn, ExactCells, RowState, row_negative_part
from fastqt.kernels.launch import cdiv, elements_of_program, on_device
from fastqt.kernels.norms import LEAST_NORM, store_through_norms
from fastqt.kernels.plan import planned

BIASES_AT_ONCE = 128  # of a program


@planned
@triton.jit
def query_gradient_kernel(
    queries,
    candidates,
    scale,
    product,  # (rows, product_width): E G; float32, or the memory of the queries' gradients
    row_factors,  # (N,) float64
    weight_norm,  # () float64
    target_starts,
    target_columns,
    target_coefficients,
    row_negatives,
    partners,
    row_negative_norms,
    row_negative_coefficients,
    query_gradient,  # (N, D)
    weighted_queries,  # (rows, product_width), of which nothing is written beyond D
    row_negative_gradient,  # (N, D)
    scale_gradient,  # (N,) float32
    mix,
    prob_scale,
    width,
    product_width,
    first_row,
    query_row_stride,
    query_stride,
    candidate_row_stride,
    candidate_stride,
    row_negative_row_stride,
    row_negative_stride,
    QUERIES: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ROW_NEGATIVE: tl.constexpr,
    ROW_NEGATIVE_GRADIENT: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    query_inverse_norms=None,  # (N,) float32, given with the following: scores are cosines
    candidate_inverse_norms=None,  # (M,) float32
):
    """One row per program: its gradient, and the weighted query that the candidates' product takes.

    The gradient is dF_i = s (factor (E G)_i + sum over exact cells of c g). The weighted query is
    prob_scale * factor / weight_norm * f_i. The division makes it about as large as f_i whatever the weights
    are, so that it fits the dtype of the queries.

    With inverse norms a_i and b_j, E G is that of E times b_j, and factor and c are multiplied by a_i and by
    a_i b_j. What this gives, y_i, lacks the derivative of the norm: dF_i = y_i - a_i^2 <f_i, y_i> f_i. The
    inner product needs all of y_i, which is kept in `product` meanwhile.
    """
    # Offsets within a row have 64 bits: the rows of a transposed matrix are as long as the matrix.
    query_stride, candidate_stride = tl.cast(query_stride, tl.int64), tl.cast(candidate_stride, tl.int64)
    row_negative_stride = tl.cast(row_negative_stride, tl.int64)

    at_row = tl.program_id(0).to(tl.int64)
    i = first_row + at_row
    s = tl.load(scale)
    factor64 = tl.load(row_factors + i)

    norm = 1.0
    if query_inverse_norms is not None:
        norm = tl.load(query_inverse_norms + i)
        factor64 *= norm
    factor = factor64.to(tl.float32)
    query_weight = (prob_scale * (factor64 / tl.load(weight_norm))).to(tl.float32)

    first, last = tl.load(target_starts + i), tl.load(target_starts + i + 1)
    # Sums over a row stay in lanes until its end: a reduction at each step would wait for all threads.
    by_scale = tl.zeros((BLOCK,), dtype=tl.float32)
    by_row_negative = tl.zeros((BLOCK,), dtype=tl.float32)

    for start in range(0, width, BLOCK):
        d = start + tl.arange(0, BLOCK)
        inside = d < width
        f = tl.load(queries + i * query_row_stride + d * query_stride, mask=inside, other=0.0).to(tl.float32)

        if WEIGHTED:
            at = weighted_queries + at_row * product_width + d
            tl.store(at, (query_weight * f).to(weighted_queries.dtype.element_ty), mask=inside)

        if ROW_NEGATIVE != NO_ROW_NEGATIVE:
            c = tl.load(row_negative_coefficients + i) * norm
        if ROW_NEGATIVE_GRADIENT:
            if query_inverse_norms is None:
                at = row_negative_gradient + i * width + d
                tl.store(at, (s * c * f).to(row_negative_gradient.dtype.element_ty), mask=inside)
            else:
                r = row_negatives + i * row_negative_row_stride + d * row_negative_stride
                by_row_negative += f * tl.load(r, mask=inside, other=0.0).to(tl.float32)

        if QUERIES or SCALE:
            of_columns = tl.load(product + at_row * product_width + d, mask=inside, other=0.0)
            gradient = factor * of_columns.to(tl.float32)

            for t in range(first, last):
                column = tl.load(target_columns + t)
                if column >= 0:
                    g = candidates + column * candidate_row_stride + d * candidate_stride
                    coefficient = tl.load(target_coefficients + t)
                    if candidate_inverse_norms is not None:
                        coefficient *= norm * tl.load(candidate_inverse_norms + column)
                    gradient += coefficient * tl.load(g, mask=inside, other=0.0).to(tl.float32)

            if ROW_NEGATIVE != NO_ROW_NEGATIVE:
                r = row_negative_part(
                    row_negatives,
                    partners,
                    mix,
                    i,
                    d,
                    inside,
                    row_negative_row_stride,
                    row_negative_stride,
                    ROW_NEGATIVE,
                    candidate_inverse_norms,
                )
                gradient += c / tl.load(row_negative_norms + i) * r

            # The derivative by the scale is the inner product of a query and its gradient, which is in
            # registers.
            by_scale += f * gradient
            if QUERIES and query_inverse_norms is not None:
                tl.store(product + at_row * product_width + d, gradient, mask=inside)
            elif QUERIES:
                at = query_gradient + i * width + d
                tl.store(at, (s * gradient).to(query_gradient.dtype.element_ty), mask=inside)

    if SCALE:
        tl.store(scale_gradient + i, tl.sum(by_scale, 0))

    if query_inverse_norms is not None:
        if QUERIES:
            store_through_norms(
                query_gradient + i * width,
                s,
                product + at_row * product_width,
                norm,
                by_scale,
                queries + i * query_row_stride,
                query_stride,
                width,
                BLOCK,
            )

        if ROW_NEGATIVE_GRADIENT:
            negative_norm = tl.load(row_negative_norms + i)
            # Of the cosine, and once more divided by the norm: both factors of r in what is subtracted.
            cosine = tl.sum(by_row_negative, 0) * norm / negative_norm
            cosine = tl.where(negative_norm > 1.0001 * LEAST_NORM, cosine, 0.0) / negative_norm
            c = s * tl.load(row_negative_coefficients + i) / negative_norm

            for start in range(0, width, BLOCK):
                d = start + tl.arange(0, BLOCK)
                inside = d < width
                f = tl.load(queries + i * query_row_stride + d * query_stride, mask=inside, other=0.0)
                r = row_negatives + i * row_negative_row_stride + d * row_negative_stride
                r = tl.load(r, mask=inside, other=0.0).to(tl.float32)

                at = row_negative_gradient + i * width + d
                gradient = c * (norm * f.to(tl.float32) - cosine * r)
                tl.store(at, gradient.to(row_negative_gradient.dtype.element_ty), mask=inside)


@triton.jit
def targets_of(j, mask, by_column):
    """The first of the targets of columns j, and how many they are: in the lists, or of a band's offsets."""
    column_starts, _, _, offsets, K = by_column
    first, count = j * 0, j * 0 + K
    if offsets is None:
        first = tl.load(column_starts + j, mask=mask, other=0)
        count = tl.load(column_starts + j + 1, mask=mask, other=0) - first
    return first, count


@triton.jit
def place_of(j, k, mask, by_column):
    """Places of targets in the order of rows, negative or beyond the last where there are none."""
    _, column_targets, _, offsets, K = by_column
    if offsets is not None:
        place = (j - tl.load(offsets + k, mask=mask, other=0)) * K + k
    else:
        place = tl.load(column_targets + k, mask=mask, other=-1)
    return place


@planned
@triton.jit(do_not_specialize=["targets"])
def candidate_gradient_kernel(
    queries,
    scale,
    product,  # (columns, product_width): the sum of Eᵀ F over chunks, F weighted; may be the gradient
    weight_norm,
    target_coefficients,
    candidate_gradient,  # (columns, D)
    prob_scale,
    K,
    targets,
    first_column,
    width,
    product_width,
    query_row_stride,
    query_stride,
    TARGETS: tl.constexpr,
    BLOCK: tl.constexpr,
    column_starts=None,  # (M + 1,) int64, given with the two following
    column_targets=None,  # int64, the targets' places in the order of rows
    target_rows=None,  # (targets,) int64
    offsets=None,  # (K,) int64, of a band, whose targets are not listed by columns
    candidate_row_stride=0,  # of `candidates`, which are given with inverse norms
    candidate_stride=0,
    candidates=None,  # (columns, D)
    query_inverse_norms=None,  # (N,) float32, given with the following: scores are cosines
    candidate_inverse_norms=None,  # (columns,) float32
):
    """One candidate per program.

    Its gradient is dG_j = s (weight_norm / prob_scale * product_j + sum over its targets of c f).

    With inverse norms a_i and b_j, the product is that of E and F times both, and c is multiplied by both.
    The derivative of the norm is added as to the queries' gradients.
    """
    # As for the queries' gradients.
    query_stride, candidate_stride = tl.cast(query_stride, tl.int64), tl.cast(candidate_stride, tl.int64)
    j = tl.program_id(0).to(tl.int64)
    s = tl.load(scale)
    factor = (tl.load(weight_norm) / prob_scale).to(tl.float32)

    if TARGETS:
        by_column = column_starts, column_targets, target_rows, offsets, K
        first, count = targets_of(first_column + j, True, by_column)

    norm = 1.0
    if candidate_inverse_norms is not None:
        norm = tl.load(candidate_inverse_norms + j)

    along = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, width, BLOCK):
        d = start + tl.arange(0, BLOCK)
        inside = d < width
        gradient = factor * tl.load(product + j * product_width + d, mask=inside, other=0.0).to(tl.float32)

        if TARGETS:
            for k in range(first, first + count):
                t = place_of(first_column + j, k, True, by_column)
                if (t >= 0) & (t < targets):
                    row = t // K if offsets is not None else tl.load(target_rows + t)
                    f = queries + row * query_row_stride + d * query_stride
                    coefficient = tl.load(target_coefficients + t)
                    if query_inverse_norms is not None:
                        coefficient *= norm * tl.load(query_inverse_norms + row)
                    gradient += coefficient * tl.load(f, mask=inside, other=0.0).to(tl.float32)

        if candidate_inverse_norms is None:
            at = candidate_gradient + j * width + d
            tl.store(at, (s * gradient).to(candidate_gradient.dtype.element_ty), mask=inside)
        else:
            g = candidates + j * candidate_row_stride + d * candidate_stride
            along += tl.load(g, mask=inside, other=0.0).to(tl.float32) * gradient
            tl.store(product + j * product_width + d, gradient, mask=inside)

    if candidate_inverse_norms is not None:
        store_through_norms(
            candidate_gradient + j * width,
            s,
            product + j * product_width,
            norm,
            along,
            candidates + j * candidate_row_stride,
            candidate_stride,
            width,
            BLOCK,
        )


@planned
@triton.jit
def bias_gradient_kernel(
    column_sums,  # (columns,) float32: of E over all rows, weighted
    weight_norm,
    target_coefficients,
    bias_gradient,  # (columns,) float32
    prob_scale,
    K,
    targets,
    columns,
    BLOCK: tl.constexpr,
    column_starts=None,
    column_targets=None,
    target_rows=None,
    offsets=None,
):
    """Many candidates per program.

    The gradient of a bias is db_j = weight_norm / prob_scale * column_sums_j + sum over its targets of c.
    """
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = j < columns
    factor = (tl.load(weight_norm) / prob_scale).to(tl.float32)
    gradient = factor * tl.load(column_sums + j, mask=inside, other=0.0)

    by_column = column_starts, column_targets, target_rows, offsets, K
    first, count = targets_of(j, inside, by_column)

    # Columns have different numbers of targets: all of a program's take as many turns as the longest.
    for k in range(0, tl.max(count, 0)):
        listed = inside & (k < count)
        t = place_of(j, first + k, listed, by_column)
        there = listed & (t >= 0) & (t < targets)
        gradient += tl.load(target_coefficients + t, mask=there, other=0.0)

    tl.store(bias_gradient + j, gradient, mask=inside)


def query_gradient_epilogue(
    queries: Tensor,
    candidates: Tensor,
    scale: Tensor,
    product: Tensor | None,  # (rows, at least D): E G; float32, or those rows of `query_gradient`
    cells: ExactCells,
    state: RowState,
    weight_norm: Tensor,  # () float64
    prob_scale: float,
    first_row: int,
    rows: int,
    *,
    query_gradient: Tensor | None,  # (N, D), contiguous as the following
    weighted_queries: Tensor | None,  # (rows, as many as `product` has)
    row_negative_gradient: Tensor | None,  # (N, D)
    scale_gradient: Tensor | None,  # (N,) float32
    inverse_norms: tuple[Tensor, Tensor] | tuple[None, None] = (None, None),  # (N,) and (M,) float32
) -> None:
    """Finishes the gradients of some rows; those that are None are not computed.

    With inverse norms `product` is overwritten. Beyond D nothing is read or written.

    `prob_scale` is a power of 2 by which fp16 probabilities are scaled to keep small ones in range; other
    dtypes have 1. `weight_norm` is the size of the rows' weights.
    """
    D = queries.shape[1]
    matrix, partners, _, norms, coefficients = cells.row_negative_tensors
    # A score that is given is no part of an embedding's gradient.
    kind = NO_ROW_NEGATIVE if matrix is None else cells.row_negative_kind
    product_width = next((x.shape[1] for x in (product, weighted_queries) if x is not None), D)

    with on_device(queries):
        query_gradient_kernel[(rows,)](
            queries,
            candidates,
            scale,
            product,
            state.factors,
            weight_norm,
            cells.starts,
            cells.columns,
            cells.coefficients,
            matrix,
            partners,
            norms,
            coefficients,
            query_gradient,
            weighted_queries,
            row_negative_gradient,
            scale_gradient,
            cells.mix,
            prob_scale,
            D,
            product_width,
            first_row,
            *queries.stride(),
            *candidates.stride(),
            *cells.row_negative_strides,
            QUERIES=query_gradient is not None,
            WEIGHTED=weighted_queries is not None,
            ROW_NEGATIVE=kind,
            ROW_NEGATIVE_GRADIENT=row_negative_gradient is not None,
            SCALE=scale_gradient is not None,
            query_inverse_norms=inverse_norms[0],
            candidate_inverse_norms=inverse_norms[1],
            **elements_of_program(D, 1024, 4),
            enable_fp_fusion=True,
        )


def candidate_gradient_epilogue(
    queries: Tensor,
    scale: Tensor,
    product: Tensor,  # (columns, at least D): Eᵀ F, F weighted; float32, or `candidate_gradient` itself
    weight_norm: Tensor,
    prob_scale: float,
    candidate_gradient: Tensor,  # (columns, D)
    *,
    by_column: ByColumn | None,
    first_column: int,
    coefficients: Tensor,
    candidates: Tensor | None = None,  # (columns, D), given with the following
    inverse_norms: tuple[Tensor, Tensor] | tuple[None, None] = (None, None),  # (N,) and (columns,) float32
) -> None:
    """Finishes the gradients of some candidates. With inverse norms `product` is overwritten."""
    columns, D = candidate_gradient.shape

    with on_device(queries):
        candidate_gradient_kernel[(columns,)](
            queries,
            scale,
            product,
            weight_norm,
            coefficients,
            candidate_gradient,
            prob_scale,
            0 if by_column is None else by_column.count,
            len(coefficients),
            first_column,
            D,
            product.shape[1],
            *queries.stride(),
            TARGETS=by_column is not None,
            **({} if by_column is None else by_column.operands),
            candidate_row_stride=0 if candidates is None else candidates.stride(0),
            candidate_stride=0 if candidates is None else candidates.stride(1),
            candidates=candidates,
            query_inverse_norms=inverse_norms[0],
            candidate_inverse_norms=inverse_norms[1],
            **elements_of_program(D, 1024, 4),
            enable_fp_fusion=True,
        )


def bias_gradient_epilogue(
    column_sums: Tensor,  # (M,) float32
    weight_norm: Tensor,
    prob_scale: float,
    by_column: ByColumn,
    coefficients: Tensor,
    bias_gradient: Tensor,  # (M,) float32
) -> None:
    """Finishes the gradients of all biases."""
    (columns,) = column_sums.shape
    with on_device(column_sums):
        bias_gradient_kernel[(cdiv(columns, BIASES_AT_ONCE),)](
            column_sums,
            weight_norm,
            coefficients,
            bias_gradient,
            prob_scale,
            by_column.count,
            len(coefficients),
            columns,
            BLOCK=BIASES_AT_ONCE,
            **by_column.operands,
            num_warps=4,
            enable_fp_fusion=True,
        )
