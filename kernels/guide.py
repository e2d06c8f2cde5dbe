"""Which of a guide's scores are above their rows' thresholds, where products in 16 bits decide nearly all.

A product is off by a bound that is known. Where the threshold is farther away, the product decides; where it
is not, the program sums that cell once more in float64, from the embeddings.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fastqt.kernels.launch import block, cdiv, on_device
from fastqt.kernels.plan import planned

COLUMNS = 1024  # of a program, at most
WIDTH = 1024  # of a step along two embeddings, at most


@planned
@triton.jit
def above_kernel(
    mask,  # (n, m) bool, written
    products,  # (n, m) float32, contiguous: approximate inner products
    queries,  # (n, E)
    candidates,  # (m, E)
    thresholds,  # (n,) float32
    row_factors,  # (n,) float64, by which inner products are multiplied for scores, as are those of columns
    column_factors,  # (m,)
    row_lengths,  # (n,) float64, the norms of embeddings times their factors
    column_lengths,  # (m,)
    m,
    E,
    mask_stride,  # of rows
    query_stride,
    query_element_stride,
    candidate_stride,
    candidate_element_stride,
    multiplier,  # of products
    error,  # of a score, for lengths of 1
    least_error,  # of a score that has lengths of 0, for factors of up to 1
    OF_UNITS: tl.constexpr,  # products are those of rows at norm 1, so that lengths are their factors
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Some columns of one row."""
    blocks = tl.cdiv(m, BLOCK_M)
    i = (tl.program_id(0) // blocks).to(tl.int64)
    start = tl.program_id(0) % blocks * BLOCK_M
    offs_m = tl.arange(0, BLOCK_M)
    mask_m = offs_m < m - start

    threshold = tl.load(thresholds + i)
    row_factor, row_length = tl.load(row_factors + i), tl.load(row_lengths + i)
    # The length of what is beyond the end is 0, and so are its product and its error.
    factor = tl.load(column_factors + start + offs_m, mask=mask_m, other=0.0).to(tl.float32)
    length = tl.load(column_lengths + start + offs_m, mask=mask_m, other=0.0).to(tl.float32)
    product = tl.load(products + i * m + start + offs_m, mask=mask_m, other=0.0)

    # One factor after the other: the product of two may be too small for float32 where the score is not.
    if OF_UNITS:
        score = product * multiplier * row_length.to(tl.float32) * length
        largest = 1.0
    else:
        score = product * multiplier * row_factor.to(tl.float32) * factor
        largest = tl.maximum(row_factor.to(tl.float32), 1.0) * tl.maximum(factor, 1.0)
    bound = error * row_length.to(tl.float32) * length + least_error * largest

    # Without a finite score, or bound, nothing is decided: comparisons with NaN are false.
    difference = score - threshold
    decided = (tl.abs(score) < float("inf")) & (tl.abs(difference) > bound)
    above = difference > 0
    near = tl.where(decided | ~mask_m, BLOCK_M, offs_m)

    column = tl.min(near, 0)
    while column < BLOCK_M:
        j = (start + column).to(tl.int64)
        terms = tl.zeros((BLOCK_E,), dtype=tl.float64)
        for e in range(0, E, BLOCK_E):
            offs_e = e + tl.arange(0, BLOCK_E)
            inside = offs_e < E
            # The elements of a transposed matrix's row are as far apart as the matrix is long.
            offs_e = offs_e.to(tl.int64)
            f = tl.load(queries + i * query_stride + offs_e * query_element_stride, mask=inside, other=0.0)
            g = tl.load(
                candidates + j * candidate_stride + offs_e * candidate_element_stride, mask=inside, other=0.0
            )
            terms += f.to(tl.float64) * g.to(tl.float64)

        exact = tl.sum(terms, 0) * row_factor * tl.load(column_factors + j)
        here = offs_m == column
        above = tl.where(here, exact.to(tl.float32) > threshold, above)
        near = tl.where(here, BLOCK_M, near)
        column = tl.min(near, 0)

    tl.store(mask + i * mask_stride + start + offs_m, above, mask=mask_m)


def write_above(
    mask: Tensor,  # (n, m) bool, whose columns are adjacent
    products: Tensor,  # (n, m) float32, contiguous
    queries: Tensor,  # (n, E)
    candidates: Tensor,  # (m, E)
    thresholds: Tensor,  # (n,) float32
    rows: tuple[Tensor, Tensor],  # the factors of queries and their lengths, (n,) float64
    columns: tuple[Tensor, Tensor],  # those of candidates, (m,)
    *,
    of_units: bool,
    multiplier: float,
    error: float,
    least_error: float,
) -> None:
    """Writes which scores are above their rows' thresholds, all of them compared as those in float64.

    A score is the product times the multiplier and its row's and its column's factors, or lengths with
    `of_units`. It may be off by `error` times both lengths, and by `least_error` where factors are at most 1.
    """
    (n, m), E = products.shape, queries.shape[1]
    if not n * m:
        return

    at_once = block(m, COLUMNS)
    with on_device(products):
        above_kernel[(n * cdiv(m, at_once),)](
            mask,
            products,
            queries,
            candidates,
            thresholds,
            rows[0],
            columns[0],
            rows[1],
            columns[1],
            m,
            E,
            mask.stride(0),
            *queries.stride(),
            *candidates.stride(),
            multiplier,
            error,
            least_error,
            OF_UNITS=of_units,
            BLOCK_M=at_once,
            BLOCK_E=block(E, WIDTH),
            num_warps=4,
            enable_fp_fusion=True,
        )
