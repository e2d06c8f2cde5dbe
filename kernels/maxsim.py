"""MaxSim: the largest product of a query's token with the tokens of a document, and which token has it.

No product reaches memory. A program holds some tokens of queries, walks along the tokens of some documents,
and keeps in registers the largest product of each with the document, and its place. Of equal products the
first one's place counts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastqt.devices import generation, on_gpu, properties, shared_bytes
from fastqt.kernels.copies import copy_rows, is_aligned, unit_of
from fastqt.kernels.launch import (
    INTERPRETED,
    Config,
    block,
    cdiv,
    compute_dtype,
    multiprocessors,
    on_device,
    precision,
)
from fastqt.kernels.plan import planned

KEPT_WIDTH = 128  # up to which a query's token of 16 bits stays in shared memory for all documents
# From Hopper on products are so fast that the L2 cache cannot bring the documents in time for blocks of 128
# tokens. Blocks of twice as many read them half as often, and need a data center's shared memory.
TALL_GENERATION, TALL_SHARED = 9, 160 * 1024
WAVES = 8  # of programs, so that the last of them leaves few multiprocessors without work
WHEN_INTERPRETED = Config(rows=16, columns=16, width=16)


@triton.jit
def larger(a, b):
    """The larger number, or NaN if either is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@planned
@triton.jit(do_not_specialize=["R", "M", "documents_at_once"])
def maxima_kernel(
    queries,  # (R, D), contiguous: tokens of queries
    documents,  # (M, U, D), contiguous
    maxima,  # (M, R) float32
    R,
    M,
    U,
    units,  # D, in units of elements
    documents_at_once,  # of a program
    KEPT: tl.constexpr,  # a step takes all of D, and the queries' tokens are loaded once
    EVEN_D: tl.constexpr,  # BLOCK_D divides D
    UNIT: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_U: tl.constexpr,
    BLOCK_D: tl.constexpr,
    bias=None,  # (M, U) float32, added to the products: minus infinity where there is no token
    lengths=None,  # (M,) int32: of documents without the padding at their ends
    places=None,  # (M, R) int16 or int32
):
    """The largest products of a block of queries' tokens with each of some documents.

    Programs that run at once have the same documents, which the L2 cache then serves.
    """
    D = units * UNIT
    tl.assume(D > 0)

    blocks_r = tl.cdiv(R, BLOCK_R)
    offs_r = tl.program_id(0) % blocks_r * BLOCK_R + tl.arange(0, BLOCK_R)
    mask_r = offs_r < R
    first = tl.program_id(0) // blocks_r * documents_at_once

    # Rows beyond the end are read as the last one, and their results are dropped.
    offs_d = tl.arange(0, BLOCK_D)
    rows = queries + tl.minimum(offs_r, R - 1).to(tl.int64)[:, None] * D + offs_d[None, :]
    inside = offs_d < D
    if KEPT:
        kept = load_part(rows, inside[None, :], EVEN_D).to(COMPUTE)

    for j in range(first, tl.minimum(first + documents_at_once, M)):
        document = tl.cast(j, tl.int64) * U
        length = U
        if lengths is not None:
            length = tl.load(lengths + j)

        most = tl.full((BLOCK_R,), float("-inf"), dtype=tl.float32)
        place = tl.zeros((BLOCK_R,), dtype=tl.int32)

        for start in range(0, length, BLOCK_U):
            # Tokens beyond the end are read as the last one: as often as it is there, it is the maximum once,
            # and it comes first.
            offs_u = tl.minimum(tl.arange(0, BLOCK_U), U - 1 - start)
            columns = documents + (document + start) * D + offs_u[None, :] * D + offs_d[:, None]

            products = tl.zeros((BLOCK_R, BLOCK_U), dtype=tl.float32)
            if KEPT:
                b = load_part(columns, inside[:, None], EVEN_D).to(COMPUTE)
                products = tl.dot(kept, b, products, input_precision=PRECISION)
            else:
                for d in range(0, D, BLOCK_D):
                    a = load_part(rows + d, (d + offs_d < D)[None, :], EVEN_D).to(COMPUTE)
                    b = load_part(columns + d, (d + offs_d < D)[:, None], EVEN_D).to(COMPUTE)
                    products = tl.dot(a, b, products, input_precision=PRECISION)
            if bias is not None:
                products += tl.load(bias + document + start + offs_u)[None, :]

            of_block = tl.reduce(products, 1, larger)
            if places is not None:
                # No number is less than a NaN, so that also then the place is one of the block.
                numbers = tl.arange(0, BLOCK_U)[None, :]
                at = tl.min(tl.where(products < of_block[:, None], BLOCK_U, numbers), 1)
                place = tl.where(of_block > most, start + at, place)
            most = larger(most, of_block)

        out = tl.cast(j, tl.int64) * R + offs_r
        tl.store(maxima + out, most, mask=mask_r)
        if places is not None:
            tl.store(places + out, place.to(places.dtype.element_ty), mask=mask_r)


@triton.jit
def load_part(at, inside, EVEN: tl.constexpr):
    """What is at some addresses, and 0 beyond the width if that is no multiple of a step."""
    return tl.load(at) if EVEN else tl.load(at, mask=inside, other=0.0)


def operand(x: Tensor, dtype: torch.dtype, *, rounded: bool) -> Tensor:
    """(rows, D) as kernels read it: in a dtype, rows at multiples of 16 bytes, perhaps rounded to TF32."""
    x = x.to(dtype).contiguous()
    if is_aligned(x) and not rounded:
        return x
    unit = unit_of(x)
    return copy_rows(x, cdiv(x.shape[1], unit) * unit, rounded=rounded)


def maxima(
    queries: Tensor,  # (R, D), contiguous, as `operand` has them, and so the next
    documents: Tensor,  # (M U, D)
    U: int,  # the tokens of a document
    bias: Tensor | None,  # (M, U) float32
    lengths: Tensor | None,  # (M,) int32
    *,
    wants_places: bool,
) -> tuple[Tensor, Tensor | None]:
    """The largest products (M, R) of queries' tokens with documents, float32, and their tokens' places."""
    (R, D), M = queries.shape, len(documents) // U
    tiles, unit = tiles_for(queries, U), unit_of(queries)
    kept = tiles.width >= D

    largest = queries.new_empty(M, R, dtype=torch.float32)
    places = None
    if wants_places:
        fits_16_bits = torch.iinfo(torch.int16).max >= U
        places = queries.new_empty(M, R, dtype=torch.int16 if fits_16_bits else torch.int32)

    blocks = cdiv(R, tiles.rows)
    programs = cdiv(WAVES * multiprocessors(queries), blocks)
    documents_at_once = cdiv(M, min(programs, M))

    with on_device(queries):
        maxima_kernel[(blocks * cdiv(M, documents_at_once),)](
            queries,
            documents,
            largest,
            R,
            M,
            U,
            D // unit,
            documents_at_once,
            KEPT=kept,
            EVEN_D=D % tiles.width == 0,
            UNIT=unit,
            COMPUTE=compute_dtype(queries.dtype),
            PRECISION=precision(queries.dtype),
            BLOCK_R=tiles.rows,
            BLOCK_U=tiles.columns,
            BLOCK_D=tiles.width,
            bias=bias,
            lengths=lengths,
            places=places,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
            enable_fp_fusion=True,
        )
    return largest, places


def tiles_for(queries: Tensor, U: int) -> Config:
    """The tiles of the products of queries' tokens (R, D) with documents of U tokens."""
    D, columns = queries.shape[1], max(block(U, 64), 16)
    if INTERPRETED:
        return WHEN_INTERPRETED
    if queries.dtype is torch.float32:
        if precision(queries.dtype) == "tf32":
            return Config(rows=128, columns=columns, width=32, warps=8, stages=3)
        # Of fewer columns than 64 a tile of 64 rows takes registers that some GPUs would spill.
        rows, stages = (64, 2) if columns == 64 else (128, 3)
        return Config(rows=rows, columns=columns, width=16, warps=8, stages=stages)
    if D > KEPT_WIDTH:
        return Config(rows=128, columns=columns, width=64, warps=4, stages=3)

    width = max(block(D, KEPT_WIDTH), 16)
    gpu = properties(queries.device) if on_gpu(queries) else None
    if gpu is not None and generation(gpu) >= TALL_GENERATION and shared_bytes(gpu) >= TALL_SHARED:
        return Config(rows=256, columns=columns, width=width, warps=8, stages=3)
    return Config(rows=128, columns=columns, width=width, warps=4, stages=2)
