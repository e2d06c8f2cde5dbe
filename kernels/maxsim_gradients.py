"""Gradients of MaxSim: sums of the tokens where maxima are, and of those whose maximum a token is.

A query's token has one row of each document. Those of a document's token are listed first: a program counts
for some tokens of a document how many maxima are at them and before them, and writes which they are in the
order of the queries. All sums are made in this order, so that the same inputs give the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastqt.kernels.copies import unit_of
from fastqt.kernels.launch import INTERPRETED, block, cdiv, on_device
from fastqt.kernels.plan import planned

WIDTH = 128  # elements of rows that a program adds up
# Of a program: tokens of queries, and the documents whose rows are loaded at once.
TOKENS, DOCUMENTS = (8, 4) if not INTERPRETED else (16, 4)
ROWS = 8  # of a bag that are loaded at once
# Of a program that lists: tokens of a document, and maxima at once.
LISTED, MAXIMA = 32, 128


@planned
@triton.jit(do_not_specialize=["R", "M"])
def query_tokens_kernel(
    documents,  # (M, U, D), contiguous
    places,  # (M, R)
    weights,  # (N, M) float32: the derivatives of the loss by the scores
    gradient,  # (R, width) float32, contiguous, written
    R,
    M,
    U,
    T,  # tokens of a query
    units,  # D, in units of elements
    width,  # at most D
    EVEN_D: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Gradients of some tokens of queries, in some columns."""
    D = units * UNIT
    blocks_d = tl.cdiv(D, BLOCK_D)
    r = tl.program_id(0) // blocks_d * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.program_id(0) % blocks_d * BLOCK_D + tl.arange(0, BLOCK_D)
    inside_r = r < R
    query = (r // T).to(tl.int64)

    # Sums over documents stay apart until the end: a reduction at each step would wait for all threads.
    total = tl.zeros((BLOCK_R, BLOCK_M, BLOCK_D), dtype=tl.float32)
    for start in range(0, M, BLOCK_M):
        j = start + tl.arange(0, BLOCK_M)
        cells = inside_r[:, None] & (j < M)[None, :]
        place = tl.load(places + j.to(tl.int64)[None, :] * R + r[:, None], mask=cells, other=0)
        weight = tl.load(weights + query[:, None] * M + j[None, :], mask=cells, other=0.0)

        row = j.to(tl.int64)[None, :] * U + place.to(tl.int64)
        at = documents + row[:, :, None] * D + d[None, None, :]
        inside = cells[:, :, None]
        if not EVEN_D:
            inside = inside & (d < D)[None, None, :]
        total += weight[:, :, None] * tl.load(at, mask=inside, other=0.0).to(tl.float32)

    at = gradient + r.to(tl.int64)[:, None] * width + d[None, :]
    tl.store(at, tl.sum(total, 1), mask=inside_r[:, None] & (d < width)[None, :])


@planned
@triton.jit(do_not_specialize=["R"])
def list_maxima_kernel(
    places,  # (M, R)
    starts,  # (M, U) int32, written: where the list of each token begins
    listed,  # (M, R) int32, written: the tokens of queries, by the place of their maximum and then their own
    R,
    U,
    BLOCK_U: tl.constexpr,
    BLOCK_R: tl.constexpr,
    lengths=None,  # (M,) int32: of documents without the padding at their ends, which has no maximum
):
    """The lists of some tokens of a document."""
    blocks_u = tl.cdiv(U, BLOCK_U)
    j = (tl.program_id(0) // blocks_u).to(tl.int64)
    first = tl.program_id(0) % blocks_u * BLOCK_U
    u = first + tl.arange(0, BLOCK_U)
    offs_r = tl.arange(0, BLOCK_R)
    of_document = places + j * R

    rows = R
    begin = tl.zeros((BLOCK_U,), dtype=tl.int32)
    if lengths is not None:
        # A document without tokens has all its maxima at the first place.
        is_padding = (first >= tl.load(lengths + j)) & (first > 0)
        rows = tl.where(is_padding, 0, R)
        begin += tl.where(is_padding, R, 0)

    before = tl.zeros((BLOCK_U, BLOCK_R), dtype=tl.int32)
    for start in range(0, rows, BLOCK_R):
        inside = offs_r < R - start
        place = tl.load(of_document + start + offs_r, mask=inside, other=0).to(tl.int32)
        before += ((place[None, :] < u[:, None]) & inside[None, :]).to(tl.int32)
    begin += tl.sum(before, 1)
    tl.store(starts + j * U + u, begin, mask=u < U)

    for start in range(0, rows, BLOCK_R):
        inside = offs_r < R - start
        place = tl.load(of_document + start + offs_r, mask=inside, other=0).to(tl.int32)
        is_there = (place[None, :] == u[:, None]) & inside[None, :]
        count = is_there.to(tl.int32)
        at = begin[:, None] + tl.cumsum(count, 1) - 1
        r = tl.broadcast_to((start + offs_r)[None, :], (BLOCK_U, BLOCK_R))
        tl.store(listed + j * R + at, r, mask=is_there)
        begin += tl.sum(count, 1)


@planned
@triton.jit(do_not_specialize=["R", "M"])
def document_tokens_kernel(
    queries,  # (R, D), contiguous
    starts,  # (M, U) int32
    listed,  # (M, R) int32
    weights,  # (N, M) float32
    gradient,  # (M, U, width) float32, contiguous, added to
    R,
    M,
    U,
    T,
    units,
    width,
    EVEN_D: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The gradient of a document's token, in some columns."""
    D = units * UNIT
    blocks_d = tl.cdiv(D, BLOCK_D)
    token = (tl.program_id(0) // blocks_d).to(tl.int64)
    d = tl.program_id(0) % blocks_d * BLOCK_D + tl.arange(0, BLOCK_D)
    j = token // U

    first, last = tl.load(starts + token), R
    if token % U < U - 1:
        last = tl.load(starts + token + 1)

    total = tl.zeros((BLOCK_R, BLOCK_D), dtype=tl.float32)
    for start in range(first, last, BLOCK_R):
        k = start + tl.arange(0, BLOCK_R)
        r = tl.load(listed + j * R + k, mask=k < last, other=0)
        weight = tl.load(weights + (r // T).to(tl.int64) * M + j, mask=k < last, other=0.0)
        inside = (k < last)[:, None]
        if not EVEN_D:
            inside = inside & (d < D)[None, :]
        at = queries + r.to(tl.int64)[:, None] * D + d[None, :]
        total += weight[:, None] * tl.load(at, mask=inside, other=0.0).to(tl.float32)

    if last > first:
        at = gradient + token * width + d
        inside = d < width
        tl.store(at, tl.load(at, mask=inside, other=0.0) + tl.sum(total, 0), mask=inside)


def columns_of(x: Tensor) -> tuple[int, int, dict[str, int | bool]]:
    """Of a matrix the width in units, the blocks of columns, and the constants that say so."""
    D, unit = x.shape[1], unit_of(x)
    step = max(block(D, WIDTH), 16)
    return D // unit, cdiv(D, step), {"EVEN_D": D % step == 0, "UNIT": unit, "BLOCK_D": step}


def gradients_of_queries(
    documents: Tensor,  # (M U, D), as `operand` has them
    places: Tensor,  # (M, R), of the maxima
    weights: Tensor,  # (N, M) float32, contiguous
    gradient: Tensor,  # (R, width) float32, contiguous, written; the width is at most D
) -> None:
    """Sums of documents' tokens: of the one of each document that has a token's maximum."""
    (M, R), (N, _) = places.shape, weights.shape
    units, blocks, constants = columns_of(documents)

    with on_device(documents):
        query_tokens_kernel[(cdiv(R, TOKENS) * blocks,)](
            documents,
            places,
            weights,
            gradient,
            R,
            M,
            len(documents) // M,
            R // N,
            units,
            gradient.shape[1],
            **constants,
            BLOCK_R=TOKENS,
            BLOCK_M=DOCUMENTS,
            num_warps=4,
            enable_fp_fusion=True,
        )


def add_gradients_of_documents(
    queries: Tensor,  # (R, D), as `operand` has them
    places: Tensor,  # (M, R)
    lengths: Tensor | None,  # (M,) int32, as `maxima` takes them
    weights: Tensor,  # (N, M) float32, contiguous
    gradient: Tensor,  # (M, U, width) float32, contiguous, added to; the width is at most D
) -> None:
    """Sums of queries' tokens: of those whose maximum is at a document's token."""
    (M, R), (N, _), (_, U, width) = places.shape, weights.shape, gradient.shape
    starts = torch.empty(M, U, dtype=torch.int32, device=places.device)
    listed = torch.empty(M, R, dtype=torch.int32, device=places.device)
    units, blocks, constants = columns_of(queries)

    with on_device(queries):
        list_maxima_kernel[(M * cdiv(U, LISTED),)](
            places,
            starts,
            listed,
            R,
            U,
            BLOCK_U=LISTED,
            BLOCK_R=MAXIMA,
            lengths=lengths,
            num_warps=4,
            enable_fp_fusion=True,
        )
        document_tokens_kernel[(M * U * blocks,)](
            queries,
            starts,
            listed,
            weights,
            gradient,
            R,
            M,
            U,
            R // N,
            units,
            width,
            **constants,
            BLOCK_R=ROWS,
            num_warps=2,
            enable_fp_fusion=True,
        )
