"""What Hopper does beside its threads is made in time where it is waited for, and else reported."""

import numpy as np
import pytest

from tests.emulator.asynchronous import TensorMap
from tests.emulator.machine import SCHEDULES
from tests.emulator.small_kernels import execute

every_schedule = pytest.mark.parametrize("schedule", SCHEDULES)
WARP_GROUP = 128
ONES = "0x3F803F80"  # two numbers in bfloat16

# A thread copies a box of 8 x 16 numbers of 32 bits to shared memory, and all wait for it.
LOAD_OF_A_BOX = """
    mov.b64 %d9, small_kernel_param_0;
    mov.b32 %r11, 0;
    mov.b32 %r12, 512;
    setp.eq.u32 %p1, %r0, 0;
    @%p1 mbarrier.init.shared::cta.b64 [%r12], 1;
    bar.sync 0;
    @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r12], 512;
    @%p1 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes
        [%r11], [%d9, {{%r11, %r11}}], [%r12];
    {wait}
"""
WAIT_FOR_THE_BOX = """
    AGAIN:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r12], 0;
    @!%p2 bra AGAIN;
"""

# Four warps multiply a matrix of ones (64 x 16) by another (16 x 8).
OPERANDS = f"""
    mul.lo.u32 %r10, %r0, 16;
    mov.b32 %r11, {ONES};
    st.shared.v4.b32 [%r10], {{%r11, %r11, %r11, %r11}};
    setp.lt.u32 %p1, %r0, 16;
    @%p1 st.shared.v4.b32 [%r10+2048], {{%r11, %r11, %r11, %r11}};
    fence.proxy.async.shared::cta;
    bar.sync 0;
    mov.b64 %d10, {8 << 32 | 64 << 16};
    mov.b64 %d11, {8 << 32 | 8 << 16 | 128};
    mov.pred %p2, 0;
"""
MULTIPLY = """
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16
        {%r20, %r21, %r22, %r23}, %d10, %d11, %p2, 1, 1, 0, 0;
    wgmma.commit_group.sync.aligned;
"""
WAIT = "wgmma.wait_group.sync.aligned 0;"
# Each thread stores a number of the result, the shared memory being free.
TAKE = """
    bar.sync 0;
    st.shared.b32 [%r10], %r0;
    mul.wide.u32 %d12, %r0, 4;
    mul.wide.u32 %d13, %r1, 512;
    add.s64 %d12, %d12, %d13;
    add.s64 %d12, %d12, %d0;
    st.global.b32 [%d12], %r22;
"""


def box_of(x):
    return TensorMap(x.ctypes.data, x.shape, x.strides[0], x.shape, x.itemsize, 0)


@every_schedule
@pytest.mark.parametrize(("wait", "wanted"), [(WAIT_FOR_THE_BOX, set()), ("", {"pending"})])
def test_a_load_arrives_before_its_block_ends(wait, wanted, schedule):
    source = np.arange(128, dtype=np.uint32).reshape(8, 16)
    options = {"threads": 64, "shared": 520, "schedule": schedule, "maps": {0: box_of(source)}}
    assert execute(LOAD_OF_A_BOX.format(wait=wait), source, **options).kinds() == wanted


@every_schedule
@pytest.mark.parametrize(
    ("wait", "wanted"),
    [
        (WAIT, set()),
        ("wgmma.wait_group.sync.aligned 1;", {"pending"}),
        ("", {"pending"}),
    ],
)
def test_a_product_is_made_before_its_thread_ends(wait, wanted, schedule):
    reports = execute(OPERANDS + MULTIPLY + wait, threads=WARP_GROUP, shared=2304, schedule=schedule)
    assert reports.kinds() == wanted
    assert all("thread ends" in str(report) for report in reports)


@every_schedule
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(
    ("together", "apart", "again"),
    [(MULTIPLY, WAIT + TAKE, ""), ("", MULTIPLY, WAIT + TAKE), ("", MULTIPLY + WAIT, TAKE)],
    ids=["wait apart", "multiply apart", "both apart"],
)
def test_a_block_waits_for_its_own_products_alone(together, apart, again, first, schedule):
    """Blocks whose ways part: what they order or wait for together is each one's own."""
    body = f"""
        {OPERANDS}
        {together}
        setp.ne.u32 %p3, %r1, {first};
        @%p3 bra LATER;
        {apart}
        bra MEET;
        LATER:
        {apart}
        MEET:
        {again}
    """
    out = np.zeros((2, WARP_GROUP), np.float32)
    options = {"threads": WARP_GROUP, "blocks": 2, "shared": 2304, "schedule": schedule}
    reports = execute(body, out, **options)
    assert not len(reports), str(reports)
    assert (out == 16).all()
