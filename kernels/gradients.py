"""Epilogues of the gradients' products: they apply the factors of rows and add the exact cells."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fastqt.kernels.cells import NO_ROW_NEGATIVE, ByColumn, ExactCells, RowState, row_negative_part
from fastqt.kernels.launch import elements_of_program, on_device
from fastqt.kernels.norms import LEAST_NORM, store_through_norms
from fastqt.kernels.plan import planned


# A first step compiles this once: what differs between the two sides of a problem is no constant.
@planned
@triton.jit(do_not_specialize=["of_columns", "factor_stride", "targets", "first_row"])
def gradient_kernel(
    embeddings,  # (rows, D): of the side whose gradients these are
    opposites,  # of the other side
    scale,
    product,  # (rows, product_width): float32, or the memory of the gradients
    factors,  # float64: what rows of the product are multiplied by, with the next
    factor,
    weight_norm,  # () float64
    target_starts,
    target_columns,
    target_coefficients,
    row_negatives,
    partners,
    row_negative_norms,
    row_negative_coefficients,
    gradient,  # (rows, D)
    weighted_queries,  # (rows, product_width), of which nothing is written beyond D
    row_negative_gradient,  # (N, D)
    scale_gradient,  # (N,) float32
    mix,
    prob_scale,
    of_columns,  # 1: the gradients are those of candidates or negatives; 0: of queries
    factor_stride,
    K,
    targets,
    first_row,
    width,
    product_width,
    row_stride,
    stride,
    opposite_row_stride,
    opposite_stride,
    row_negative_row_stride,
    row_negative_stride,
    GRADIENT: tl.constexpr,
    WEIGHTED: tl.constexpr,
    TARGETS: tl.constexpr,
    ROW_NEGATIVE: tl.constexpr,
    ROW_NEGATIVE_GRADIENT: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    target_places=None,  # int64, of lists by columns: the targets' places in the order of rows
    offsets=None,  # (K,) int64, of a band, whose targets are not listed by columns
    inverse_norms=None,  # (rows,) float32, given with the following: scores are cosines
    opposite_inverse_norms=None,
):
    """One row of one side per program: its gradient, and of a query what the candidates' product takes.

    The gradient of a query is dF_i = s (factor (E G)_i + sum over exact cells of c g), that of a candidate
    dG_j = s (weight_norm / prob_scale (Eᵀ F)_j + sum over its targets of c f), F weighted. The weighted query
    is prob_scale * factor / weight_norm * f_i. The division makes it about as large as f_i whatever the
    weights are, so that it fits the dtype of the queries. Row negatives, weighted queries and the scale's
    gradient belong to queries: a launch of columns may be given the latter two, and leaves them alone.

    With inverse norms a_i and b_j, E G is that of E times b_j, and factor and c are multiplied by a_i and by
    a_i b_j. Eᵀ F holds both. What this gives, y_i, lacks the derivative of the norm:
    dF_i = y_i - a_i^2 <f_i, y_i> f_i. The inner product needs all of y_i, which is kept in `product`
    meanwhile.
    """
    # Offsets within a row have 64 bits: the rows of a transposed matrix are as long as the matrix.
    stride, opposite_stride = tl.cast(stride, tl.int64), tl.cast(opposite_stride, tl.int64)
    row_negative_stride = tl.cast(row_negative_stride, tl.int64)

    width_of_queries = width * (1 - of_columns)  # 0 where rows are read and written that only queries have
    at_row = tl.program_id(0).to(tl.int64)
    i = first_row + at_row
    s = tl.load(scale)
    factor64 = tl.load(factors + i * factor_stride) * factor

    norm = 1.0
    if inverse_norms is not None:
        norm = tl.load(inverse_norms + i)
        if of_columns == 0:
            factor64 *= norm
    if WEIGHTED:
        query_weight = (prob_scale * (factor64 / tl.load(weight_norm))).to(tl.float32)
    of_product = factor64.to(tl.float32)

    if TARGETS:
        by_row = target_starts, target_places, offsets, K, of_columns
        first, count = targets_of_row(i, by_row)

    # Sums over a row stay in lanes until its end: a reduction at each step would wait for all threads.
    along = tl.zeros((BLOCK,), dtype=tl.float32)
    by_row_negative = tl.zeros((BLOCK,), dtype=tl.float32)

    for start in range(0, width, BLOCK):
        d = start + tl.arange(0, BLOCK)
        inside = d < width

        if WEIGHTED or SCALE or ROW_NEGATIVE_GRADIENT or inverse_norms is not None:
            read = d < (width_of_queries if inverse_norms is None else width)
            f = tl.load(embeddings + i * row_stride + d * stride, mask=read, other=0.0).to(tl.float32)

        if WEIGHTED:
            at = weighted_queries + at_row * product_width + d
            weighted = (query_weight * f).to(weighted_queries.dtype.element_ty)
            tl.store(at, weighted, mask=d < width_of_queries)

        if ROW_NEGATIVE != NO_ROW_NEGATIVE:
            c = tl.load(row_negative_coefficients + i) * norm
        if ROW_NEGATIVE_GRADIENT:
            if inverse_norms is None:
                at = row_negative_gradient + i * width + d
                tl.store(at, (s * c * f).to(row_negative_gradient.dtype.element_ty), mask=inside)
            else:
                r = row_negatives + i * row_negative_row_stride + d * row_negative_stride
                by_row_negative += f * tl.load(r, mask=inside, other=0.0).to(tl.float32)

        if GRADIENT or SCALE:
            of_opposites = tl.load(product + at_row * product_width + d, mask=inside, other=0.0)
            y = of_product * of_opposites.to(tl.float32)

            if TARGETS:
                for k in range(first, first + count):
                    t, opposite = target_of_row(i, k, target_columns, targets, by_row)
                    if opposite >= 0:
                        g = opposites + opposite * opposite_row_stride + d * opposite_stride
                        coefficient = tl.load(target_coefficients + t)
                        if inverse_norms is not None:
                            coefficient *= norm * tl.load(opposite_inverse_norms + opposite)
                        y += coefficient * tl.load(g, mask=inside, other=0.0).to(tl.float32)

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
                    opposite_inverse_norms,
                )
                y += c / tl.load(row_negative_norms + i) * r

            # The derivative by the scale is the inner product of a query and its gradient, which is in
            # registers.
            if SCALE or inverse_norms is not None:
                along += f * y
            if GRADIENT and inverse_norms is not None:
                tl.store(product + at_row * product_width + d, y, mask=inside)
            elif GRADIENT:
                tl.store(gradient + i * width + d, (s * y).to(gradient.dtype.element_ty), mask=inside)

    if SCALE:
        total = tl.sum(along, 0)
        if of_columns == 0:
            tl.store(scale_gradient + i, total)

    if inverse_norms is not None:
        if GRADIENT:
            store_through_norms(
                gradient + i * width,
                s,
                product + at_row * product_width,
                norm,
                along,
                embeddings + i * row_stride,
                stride,
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
                f = tl.load(embeddings + i * row_stride + d * stride, mask=inside, other=0.0)
                r = row_negatives + i * row_negative_row_stride + d * row_negative_stride
                r = tl.load(r, mask=inside, other=0.0).to(tl.float32)

                at = row_negative_gradient + i * width + d
                unfinished = c * (norm * f.to(tl.float32) - cosine * r)
                tl.store(at, unfinished.to(row_negative_gradient.dtype.element_ty), mask=inside)


@triton.jit
def targets_of_row(i, by_row):
    """The first of the targets of row i of a side, and how many they are: in lists or of a band's offsets."""
    target_starts, _, offsets, K, _ = by_row
    first, count = i * 0, i * 0 + K
    if offsets is None:
        first = tl.load(target_starts + i)
        count = tl.load(target_starts + i + 1) - first
    return first, count


@triton.jit
def target_of_row(i, k, target_columns, targets, by_row):
    """The place of a target in the order of the queries, and its row on the other side, -1 if there is none.

    In the lists of columns the latter are rows, by their places. Those of a band are not listed by columns.
    """
    _, target_places, offsets, K, of_columns = by_row
    t = k
    if offsets is not None:
        t = (i - of_columns * tl.load(offsets + k)) * K + k
    elif target_places is not None:
        t = tl.load(target_places + k)

    opposite = tl.cast(-1, tl.int64)
    if (t >= 0) & (t < targets):
        if offsets is not None and of_columns != 0:
            opposite = tl.cast(t // K, tl.int64)
        else:
            opposite = tl.load(target_columns + t)
    return t, opposite


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
    offsets: Tensor | None,  # (K,) int64, of a band of targets
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
        gradient_kernel[(rows,)](
            queries,
            candidates,
            scale,
            product,
            state.factors,
            1.0,
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
            0,
            1,
            0 if offsets is None else len(offsets),
            len(cells.coefficients),
            first_row,
            D,
            product_width,
            *queries.stride(),
            *candidates.stride(),
            *cells.row_negative_strides,
            GRADIENT=query_gradient is not None,
            WEIGHTED=weighted_queries is not None,
            TARGETS=True,
            ROW_NEGATIVE=kind,
            ROW_NEGATIVE_GRADIENT=row_negative_gradient is not None,
            SCALE=scale_gradient is not None,
            offsets=offsets,
            inverse_norms=inverse_norms[0],
            opposite_inverse_norms=inverse_norms[1],
            **elements_of_program(D, 1024, 4),
            enable_fp_fusion=True,
        )


def candidate_gradient_epilogue(
    queries: Tensor,
    candidates: Tensor,  # (M, D), or negatives
    scale: Tensor,
    product: Tensor,  # (columns, at least D): Eᵀ F, F weighted; float32, or rows of `candidate_gradient`
    cells: ExactCells,
    weight_norm: Tensor,
    prob_scale: float,
    first_column: int,
    columns: int,
    *,
    by_column: ByColumn | None,  # where targets are; None of negatives
    candidate_gradient: Tensor,  # (M, D), contiguous
    weighted: bool,  # whether queries were weighted
    scale_gradient: Tensor | None,  # (N,) float32, as of the queries
    inverse_norms: tuple[Tensor, Tensor] | tuple[None, None] = (None, None),  # (N,) and (M,) float32
) -> None:
    """Finishes the gradients of some candidates. With inverse norms `product` is overwritten.

    What the queries' launch writes beside gradients is named here too, so that the same code serves both.
    """
    D = candidates.shape[1]
    by_column, with_targets = by_column or ByColumn(), by_column is not None

    with on_device(queries):
        gradient_kernel[(columns,)](
            candidates,
            queries,
            scale,
            product,
            weight_norm,
            1 / prob_scale,
            weight_norm,
            cells.starts if by_column.starts is None else by_column.starts,
            cells.columns if by_column.rows is None else by_column.rows,
            cells.coefficients,
            None,
            None,
            None,
            None,
            candidate_gradient,
            candidate_gradient if weighted else None,  # of the same dtype; nothing is written there
            None,
            scale_gradient,
            1.0,
            prob_scale,
            1,
            0,
            by_column.count,
            len(cells.coefficients),
            first_column,
            D,
            product.shape[1],
            *candidates.stride(),
            *queries.stride(),
            0,
            0,
            GRADIENT=True,
            WEIGHTED=weighted,
            TARGETS=with_targets,
            ROW_NEGATIVE=NO_ROW_NEGATIVE,
            ROW_NEGATIVE_GRADIENT=False,
            SCALE=scale_gradient is not None,
            target_places=by_column.places,
            offsets=by_column.offsets,
            inverse_norms=inverse_norms[1],
            opposite_inverse_norms=inverse_norms[0],
            **elements_of_program(D, 1024, 4),
            enable_fp_fusion=True,
        )
