"""Faults that a GPU would not tell of are reported, in any order of warps, and correct kernels are not."""

import numpy as np
import pytest

from tests.emulator.machine import SCHEDULES, StoppedError
from tests.emulator.small_kernels import execute

# Each thread stores its number to shared memory and reads that of a thread of the other warp.
EXCHANGE = """
    mul.lo.u32 %r10, %r0, 4;
    st.shared.b32 [%r10], %r0;
    {between}
    xor.b32 %r11, %r10, 128;
    ld.shared.b32 %r12, [%r11];
    mul.wide.u32 %d10, %r0, 4;
    add.s64 %d10, %d10, %d0;
    st.global.b32 [%d10], %r12;
"""
STORE = """
    mul.wide.u32 %d10, %r0, {apart};
    add.s64 %d10, %d10, %d0;
    {guard} st.global.b32 [%d10+{offset}], %r0;
"""
COPY = """
    mul.lo.u32 %r10, %r0, 16;
    mul.wide.u32 %d10, %r0, 16;
    add.s64 %d10, %d10, %d0;
    cp.async.cg.shared.global [%r10], [%d10], 0x10;
    cp.async.commit_group;
    {wait}
    ld.shared.b32 %r12, [%r10];
    add.s64 %d10, %d10, %d1;
    sub.s64 %d10, %d10, %d0;
    st.global.b32 [%d10], %r12;
"""
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES)


def kinds(body, *arrays, **options):
    return execute(body, *arrays, **options).kinds()


@every_schedule
@pytest.mark.parametrize(("between", "wanted"), [("bar.sync 0;", set()), ("", {"race"})])
def test_an_exchange_wants_a_barrier(between, wanted, schedule):
    out = np.zeros(64, np.uint32)
    found = kinds(EXCHANGE.format(between=between), out, threads=64, shared=256, schedule=schedule)
    assert found - {"uninitialised"} == wanted  # a warp alone reads before the other has written
    if not wanted:
        assert out.tolist() == [t ^ 32 for t in range(64)]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (STORE.format(apart=4, offset=0, guard=""), set()),
        (STORE.format(apart=4, offset=4, guard=""), {"bounds"}),
        (STORE.format(apart=4, offset=-4, guard=""), {"bounds"}),
        (STORE.format(apart=4, offset=4, guard="setp.lt.u32 %p1, %r0, 31; @%p1"), set()),
        (STORE.format(apart=3, offset=0, guard=""), {"alignment"}),
        (STORE.format(apart=0, offset=0, guard=""), {"values"}),
        ("ld.shared.b32 %r10, [global_smem];", {"uninitialised"}),
        ("mov.b32 %r10, 64; ld.shared.b32 %r10, [%r10];", {"bounds"}),
        (
            "setp.lt.u32 %p1, %r0, 7; @%p1 bra AHEAD; shfl.sync.bfly.b32 %r9, %r0, 1, 31, -1; AHEAD:",
            {"divergence"},
        ),
    ],
    ids=["fine", "above", "below", "guarded", "not aligned", "one address", "unwritten", "shared", "parted"],
)
def test_single_faults(text, wanted):
    assert kinds(text, np.full(32, 99, np.uint32), shared=64) == wanted


@pytest.mark.parametrize(
    ("wait", "wanted"),
    [("cp.async.wait_group 0;", set()), ("cp.async.wait_group 1;", {"pending"}), ("", {"pending"})],
)
def test_a_copy_is_waited_for(wait, wanted):
    source, out = np.arange(128, dtype=np.uint32), np.zeros(128, np.uint32)
    assert kinds(COPY.format(wait=wait), source, out, shared=512) == wanted
    if not wanted:
        assert out[::4].tolist() == source[::4].tolist()


def test_threads_that_wait_for_others_that_do_not_come():
    with pytest.raises(StoppedError, match="at barriers"):
        execute("setp.lt.u32 %p1, %r0, 32; @%p1 bra END; bar.sync 0, 64; END:", threads=64)
    with pytest.raises(StoppedError, match="mbarriers 32"):
        execute(
            """
            setp.eq.u32 %p1, %r0, 0;
            mov.b32 %r10, 0;
            @%p1 mbarrier.init.shared::cta.b64 [%r10], 1;
            bar.sync 0;
            AGAIN:
            mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r10], 0;
            @!%p2 bra AGAIN;
            """,
            shared=64,
        )


@every_schedule
def test_an_mbarrier_orders_what_was_before_its_phase_is_complete(schedule):
    """Warp 1 waits for the first phase, which is complete after the store of warp 0, or before it."""
    body = """
        mov.b32 %r10, 128;
        setp.eq.u32 %p1, %r0, 0;
        @%p1 mbarrier.init.shared::cta.b64 [%r10], {expected};
        bar.sync 0;
        and.b32 %r11, %r0, 31;
        mul.lo.u32 %r11, %r11, 4;
        setp.ge.u32 %p2, %r0, 32;
        @%p2 bra SECOND;
        mbarrier.arrive.shared::cta.b64 _, [%r10];
        st.shared.b32 [%r11], %r0;
        @%p1 mbarrier.arrive.shared::cta.b64 _, [%r10];
        bra END;
        SECOND:
        {wait}
        ld.shared.b32 %r12, [%r11];
        END:
    """
    wait = "AGAIN: mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r10], 0; @!%p3 bra AGAIN;"
    options = {"threads": 64, "shared": 192, "schedule": schedule}
    assert kinds(body.format(expected=33, wait=wait), **options) == set()
    assert "race" in kinds(body.format(expected=32, wait=wait), **options)
    assert kinds(body.format(expected=33, wait=""), **options) & {"race", "uninitialised"}


@every_schedule
def test_threads_that_part_meet_again(schedule):
    """A way round that lies behind the place where the ways meet."""
    body = """
        setp.lt.u32 %p1, %r0, 5;
        mov.b32 %r10, 1;
        @%p1 bra ROUND;
        MEET:
        shfl.sync.bfly.b32 %r11, %r10, 16, 31, -1;
        mul.wide.u32 %d10, %r0, 4;
        add.s64 %d10, %d10, %d0;
        st.global.b32 [%d10], %r11;
        bra END;
        ROUND:
        mov.b32 %r10, 2;
        bra MEET;
        END:
    """
    out = np.zeros(32, np.uint32)
    assert kinds(body, out, schedule=schedule) == set()
    assert out.tolist() == [2 if t ^ 16 < 5 else 1 for t in range(32)]


@every_schedule
def test_threads_that_part_meet_again_in_a_kernel_that_polls(schedule):
    """Where a loop may wait for others, those who have waited longest have turns, each warp by itself."""
    body = """
        mul.lo.u32 %r10, %r0, 7;
        and.b32 %r10, %r10, 31;
        ROUND:
        sub.s32 %r10, %r10, 5;
        setp.ge.s32 %p1, %r10, 0;
        @%p1 bra ROUND;
        shfl.sync.bfly.b32 %r11, %r0, 16, 31, -1;
        mul.wide.u32 %d10, %r0, 4;
        add.s64 %d10, %d10, %d0;
        st.global.b32 [%d10], %r11;
        setp.lt.u32 %p2, %r0, 1000;
        @%p2 bra END;
        POLL:
        ld.relaxed.gpu.global.b32 %r12, [%d0];
        setp.eq.u32 %p3, %r12, 0;
        @%p3 bra POLL;
        END:
    """
    for seed in range(5):
        out = np.zeros(128, np.uint32)
        assert kinds(body, out, threads=128, schedule=schedule, seed=seed) == set()
        assert out.tolist() == [t ^ 16 for t in range(128)]
