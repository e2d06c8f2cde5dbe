"""The exponentials of the scores, by warps of different roles on Hopper: written in Triton's Gluon.

Each program stays on its multiprocessor and walks over tiles, of 128 x 256 scores for example. One warp
copies the operands of all tiles into a ring of stages in shared memory. Two groups of four warps multiply
them, each for one half of a tile's rows, and turn the scores into exponentials. Both read the same
candidates, but the second group follows the first one at a distance of LEAD steps, so that they are not in
their epilogues at the same time: while one is, the other one has the tensor cores to itself.

Barriers in shared memory order the three roles:

- filled[stage]: the copies into a stage have arrived. Both groups wait for it.
- read[stage]: both groups have multiplied what is in a stage. The copying warp waits for it.
- led: the first group has begun LEAD steps of a tile. The second one waits for it before it begins the tile.

A wait knows only whether the phase that it waits for is even or odd. The ring keeps the groups close enough
for that if a tile has at least as many steps as the ring has stages.

No device has run this kernel yet. The tests compile it for Hopper, where it spills no registers, and execute
its PTX on an emulator, with the roles in random turns. How fast it is, nobody has measured.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fastqt.kernels.cells import LOG2_E
from fastqt.kernels.scores.epilogues import EXP, scores_log2
from fastqt.kernels.scores.exclusions import exclude_exact_cells, load_row_targets
from fastqt.kernels.scores.mainloop import grouped_blocks

# Triton 3.6 has the older names of both.
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
GROUPS = gl.constexpr(2)


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """The stage after `stage`, and the phase of its barriers: each turn of the ring is another one."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def copy_operands(matrices, ring, barriers, sizes, corner, GROUP_N: gl.constexpr, STAGES: gl.constexpr):
    """The role of one warp: copies the operands of all of the program's tiles into the ring."""
    queries, candidates = matrices
    query_ring, candidate_ring = ring
    filled, read, _ = barriers
    N, M, D = sizes

    GROUP_ROWS: gl.constexpr = queries.block_type.shape[0]
    BLOCK_D: gl.constexpr = queries.block_type.shape[1]
    BLOCK_M: gl.constexpr = candidates.block_type.shape[0]
    copied: gl.constexpr = GROUPS * queries.block_type.nbytes + candidates.block_type.nbytes

    blocks_n = gl.cdiv(N, GROUPS * GROUP_ROWS)
    blocks_m = gl.cdiv(M, BLOCK_M)
    stage, phase = 0, 1  # All stages are free at first: a wait for the phase before the first one returns.
    for tile in range(gl.program_id(0), blocks_n * blocks_m, gl.num_programs(0)):
        block_n, block_m = grouped_blocks(tile, blocks_n, blocks_m, GROUP_N)
        row, column = corner + block_n * (GROUPS * GROUP_ROWS), block_m * BLOCK_M

        for d in range(0, D, BLOCK_D):
            mbarrier.wait(read.index(stage), phase)

            # The phase of the barrier ends when this many bytes have arrived.
            bar = filled.index(stage)
            mbarrier.expect(bar, copied)

            async_load(candidates, [column, d], bar, candidate_ring.index(stage))
            for group in gl.static_range(GROUPS):
                at = query_ring.index(stage * GROUPS + group)
                async_load(queries, [row + group * GROUP_ROWS, d], bar, at)

            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def multiply(
    scores,
    ring,
    barriers,
    stage,
    phase,
    d,
    BLOCK_D: gl.constexpr,
    ADD: gl.constexpr,
    GROUP: gl.constexpr,
    LEAD: gl.constexpr,
):
    """Issues the products of one step, and waits for those of the step before."""
    query_ring, candidate_ring = ring
    filled, _, led = barriers
    mbarrier.wait(filled.index(stage), phase)
    a = query_ring.index(stage * GROUPS + GROUP)
    b = candidate_ring.index(stage).permute((1, 0))
    scores = warpgroup_mma(a, b, scores, use_acc=ADD, is_async=True)
    if GROUP == 0:
        mbarrier.arrive(led, pred=d == (LEAD - 1) * BLOCK_D)
    return warpgroup_mma_wait(1, deps=(scores,))


@gluon.jit
def make_exponentials(
    shared,
    GROUP: gl.constexpr,
    EXCLUDE_DIAGONAL: gl.constexpr,
    GROUP_N: gl.constexpr,
    STAGES: gl.constexpr,
    LEAD: gl.constexpr,
):
    """The role of four warps: exponentials of one half of each tile's rows."""
    ring, barriers, sizes, firsts, of_rows, targets, stored = shared
    query_ring, candidate_ring = ring
    _, read, led = barriers
    N, M, D = sizes
    first_n, first_m = firsts
    scale, row_shift_log2, row_factors, tile_row_sums = of_rows

    GROUP_ROWS: gl.constexpr = query_ring.shape[1]
    BLOCK_D: gl.constexpr = query_ring.shape[2]
    BLOCK_M: gl.constexpr = candidate_ring.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])

    scale_log2 = gl.load(scale) * LOG2_E
    blocks_n = gl.cdiv(N, GROUPS * GROUP_ROWS)
    blocks_m = gl.cdiv(M, BLOCK_M)
    stage, phase, lead_phase = 0, 0, 0

    # Values that the compiler moved out of this loop would take the registers of the products.
    for tile in tl.range(gl.program_id(0), blocks_n * blocks_m, gl.num_programs(0), disable_licm=True):
        block_n, block_m = grouped_blocks(tile, blocks_n, blocks_m, GROUP_N)
        start_n = block_n * (GROUPS * GROUP_ROWS) + GROUP * GROUP_ROWS
        start_m = block_m * BLOCK_M

        offs_n = gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, layout))
        offs_m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, layout))
        mask_n = offs_n < N - start_n
        row, column = first_n + start_n + offs_n, first_m + start_m + offs_m

        # What the epilogue needs of each row is loaded first: it arrives while the products are made.
        row_shift = gl.load(row_shift_log2 + row, mask=mask_n, other=0.0)
        row_factor, row_targets = None, None
        if row_factors is not None:
            row_factor = gl.load(row_factors + row, mask=mask_n, other=0.0)
        if targets[0] is not None:
            row_targets = load_row_targets(targets, row, mask_n)

        if GROUP == 1:
            mbarrier.wait(led, lead_phase)
            lead_phase ^= 1

        # Products that add to nothing need no zeros in registers.
        scores = gl.zeros((GROUP_ROWS, BLOCK_M), gl.float32, layout)
        scores = multiply(scores, ring, barriers, stage, phase, 0, BLOCK_D, False, GROUP, LEAD)
        before = stage
        stage, phase = next_stage(stage, phase, STAGES)

        for d in range(BLOCK_D, D, BLOCK_D):
            scores = multiply(scores, ring, barriers, stage, phase, d, BLOCK_D, True, GROUP, LEAD)
            mbarrier.arrive(read.index(before))
            before = stage
            stage, phase = next_stage(stage, phase, STAGES)

        scores = warpgroup_mma_wait(0, deps=(scores,))
        mbarrier.arrive(read.index(before))

        x = scores_log2(scores, scale_log2, row_shift, mask_n, EXP)
        if M - start_m < BLOCK_M:
            x = gl.where((offs_m < M - start_m)[None, :], x, float("-inf"))

        corner = first_n + start_n, first_m + start_m
        x = exclude_exact_cells(x, corner, (row, column), row_targets, targets[1], EXCLUDE_DIAGONAL)

        at = tile_row_sums
        if tile_row_sums is not None:
            at = tile_row_sums + gl.cast(block_m, gl.int64) * N + start_n + offs_n

        write_exponentials(x, row_factor, at, mask_n, stored, (start_n, start_m), GROUP)

    if stored[0] is not None:
        tma.store_wait(0)  # The memory that is copied from must outlive the copies.


@gluon.jit
def halves(x):
    """The left and the right half of a tile: no value leaves its thread."""
    ROWS: gl.constexpr = x.shape[0]
    HALF: gl.constexpr = x.shape[1] // 2
    return x.reshape((ROWS, 2, HALF)).permute((0, 2, 1)).split()


@gluon.jit
def write_exponentials(x, row_factor, row_sums_at, mask_n, stored, start, GROUP: gl.constexpr):
    """The sum of each row of E = 2^x, and E itself: each quarter is copied out while the next one is made."""
    out, staged = stored
    start_n, start_m = start
    ROWS: gl.constexpr = x.shape[0]
    WIDTH: gl.constexpr = x.shape[1] // 4
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    by_row: gl.constexpr = gl.SliceLayout(1, layout)

    left, right = halves(x)
    pieces = halves(left) + halves(right)
    if row_factor is not None:
        row_factor = gl.convert_layout(row_factor, by_row, assert_trivial=True)
    sums = gl.zeros((ROWS,), gl.float32, by_row)

    for piece in gl.static_range(4):
        e = gl.exp2(gl.convert_layout(pieces[piece], layout, assert_trivial=True))
        sums += gl.sum(e, 1)

        if out is not None:
            if row_factor is not None:
                e *= row_factor[:, None]

            # Two buffers for each group, in turns: a piece is made while the one before it is copied.
            buffer = staged.index(2 * GROUP + piece % 2)
            tma.store_wait(1)  # The copy before the last one has read this buffer.
            buffer.store(e.to(out.dtype))
            fence_async_shared()
            async_store(out, [start_n, start_m + piece * WIDTH], buffer)

    if row_sums_at is not None:
        sums = gl.convert_layout(sums, row_sums_at.type.layout, assert_trivial=True)
        gl.store(row_sums_at, sums, mask=mask_n)


@gluon.jit
def warp_specialized_scores_kernel(
    queries,  # (all rows, D): a descriptor of blocks (BLOCK_N / 2, BLOCK_D)
    candidates,  # (M, D): a descriptor of blocks (BLOCK_M, BLOCK_D)
    scale,  # () float32
    row_shift_log2,  # (all rows,) float32
    N,  # rows of this launch, a part of all rows
    M,  # columns of this launch, a part of all columns
    D,
    first_n,  # of the rows among all rows
    first_m,  # of the columns among all columns
    EXCLUDE_DIAGONAL: gl.constexpr,
    GROUP_N: gl.constexpr,
    STAGES: gl.constexpr,
    LEAD: gl.constexpr,
    out=None,  # (N, M): E, a descriptor of blocks (BLOCK_N / 2, BLOCK_M / 4)
    row_factors=None,  # (all rows,) float32, of what is stored
    tile_row_sums=None,  # (blocks of columns, N) float32
    target_starts=None,  # (all rows + 1,) int64, given with the three following
    target_columns=None,  # (targets,) int64, -1 for none
    lowest_targets=None,  # (all rows,) int32, NOWHERE without any
    highest_targets=None,  # (all rows,) int32
):
    gl.static_assert(LEAD <= STAGES)
    GROUP_ROWS: gl.constexpr = queries.block_type.shape[0]
    BLOCK_D: gl.constexpr = queries.block_type.shape[1]
    BLOCK_M: gl.constexpr = candidates.block_type.shape[0]

    query_ring = gl.allocate_shared_memory(
        queries.dtype, [STAGES * GROUPS, GROUP_ROWS, BLOCK_D], queries.layout
    )
    candidate_ring = gl.allocate_shared_memory(
        candidates.dtype, [STAGES, BLOCK_M, BLOCK_D], candidates.layout
    )

    stored = out, None
    if out is not None:
        pieces: gl.constexpr = [2 * GROUPS, GROUP_ROWS, BLOCK_M // 4]
        stored = out, gl.allocate_shared_memory(out.dtype, pieces, out.layout)

    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    read = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    led = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())

    for stage in gl.static_range(STAGES):
        mbarrier.init(filled.index(stage), count=1)
        mbarrier.init(read.index(stage), count=GROUPS)
    mbarrier.init(led, count=1)
    fence_async_shared()  # The copies that complete a barrier's phase must find it initialised.

    matrices, ring, barriers = (queries, candidates), (query_ring, candidate_ring), (filled, read, led)
    sizes, firsts = (N, M, D), (first_n, first_m)
    of_rows = scale, row_shift_log2, row_factors, tile_row_sums
    targets = target_starts, target_columns, lowest_targets, highest_targets
    shared = ring, barriers, sizes, firsts, of_rows, targets, stored
    gl.warp_specialize(
        [
            (make_exponentials, (shared, 0, EXCLUDE_DIAGONAL, GROUP_N, STAGES, LEAD)),
            (make_exponentials, (shared, 1, EXCLUDE_DIAGONAL, GROUP_N, STAGES, LEAD)),
            (copy_operands, (matrices, ring, barriers, sizes, first_n, GROUP_N, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )
