"""What blocks see of each other's stores: as late as the memory model allows, but in time where it orders."""

import numpy as np
import pytest

from tests.emulator.machine import SCHEDULES
from tests.emulator.small_kernels import execute

# Block 0 stores 7 and raises a flag; block 1 waits for the flag and takes what it sees.
MESSAGE = """
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra READER;
    mov.b32 %r10, 7;
    st.global.b32 [%d0], %r10;
    {between}
    mov.b32 %r11, 1;
    st.{store}.global.b32 [%d1], %r11;
    bra END;
    READER:
    ld.{load}.global.b32 %r12, [%d1];
    setp.eq.u32 %p2, %r12, 0;
    @%p2 bra READER;
    {after}
    ld.global.b32 %r13, [%d0];
    st.global.b32 [%d2], %r13;
    END:
"""
FENCE = "fence.acq_rel.gpu;"
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES)


def received(schedule="lockstep", between="", store="relaxed.gpu", load="relaxed.gpu", after="", late=True):
    """What block 1 has read, and the kinds of reports."""
    data, flag, out = (np.zeros(1, np.uint32) for _ in range(3))
    body = MESSAGE.format(between=between, store=store, load=load, after=after)
    reports = execute(body, data, flag, out, threads=32, blocks=2, schedule=schedule, late=late)
    assert data[0] == 7
    return int(out[0]), reports.kinds()


@every_schedule
@pytest.mark.parametrize(
    "ordered",
    [
        {"between": FENCE, "after": FENCE},
        {"between": "membar.gl;", "after": "membar.gl;", "store": "volatile", "load": "volatile"},
        {"between": "fence.sc.sys;", "load": "acquire.gpu"},
        {"store": "release.gpu", "after": FENCE},
        {"store": "release.gpu", "load": "acquire.sys"},
    ],
    ids=lambda x: ", ".join(x.values()),
)
def test_a_message_arrives_if_both_sides_order_it(ordered, schedule):
    assert received(schedule, **ordered) == (7, set())


@every_schedule
@pytest.mark.parametrize(
    "missing",
    [
        {},
        {"between": FENCE},
        {"after": FENCE},
        {"between": "fence.acq_rel.cta;", "after": FENCE},
        {"between": FENCE, "after": "membar.cta;"},
        {"store": "release.cta", "load": "acquire.gpu"},
        {"store": "relaxed.gpu", "load": "acquire.gpu"},
        {"store": "release.gpu", "load": "relaxed.gpu"},
    ],
    ids=lambda x: ", ".join(x.values()) or "nothing",
)
def test_a_message_is_late_where_an_order_is_missing(missing, schedule):
    assert received(schedule, **missing) == (0, {"race"})


def test_values_alone_do_not_tell_of_a_missing_order_without_that_mode():
    assert received(late=False) == (7, {"race"})


@every_schedule
def test_an_order_goes_on_through_a_third_block(schedule):
    """Block 0 tells block 1, which tells block 2 of both; a barrier joins a block's threads."""
    body = """
        setp.eq.u32 %p9, %r0, 63;
        mul.wide.u32 %d10, %r1, 4;
        add.s64 %d11, %d10, %d0;
        add.s64 %d12, %d10, %d1;
        setp.eq.u32 %p1, %r1, 0;
        @%p1 bra FIRST;
        setp.ne.u32 %p3, %r0, 0;
        @%p3 bra WAITED;
        AGAIN:
        ld.relaxed.gpu.global.b32 %r12, [%d12+-4];
        setp.eq.u32 %p2, %r12, 0;
        @%p2 bra AGAIN;
        {fence}
        WAITED:
        bar.sync 0;
        FIRST:
        setp.eq.u32 %p4, %r1, 2;
        @%p4 bra LAST;
        add.u32 %r10, %r1, 10;
        @%p9 st.global.b32 [%d11], %r10;
        bar.sync 0;
        setp.eq.u32 %p5, %r0, 0;
        mov.b32 %r11, 1;
        {fence}
        @%p5 st.relaxed.gpu.global.b32 [%d12], %r11;
        bra END;
        LAST:
        @%p9 ld.global.v2.b32 {{%r20, %r21}}, [%d0];
        @%p9 st.global.v2.b32 [%d2], {{%r20, %r21}};
        END:
    """
    for fence, wanted, kinds in ((FENCE, [10, 11], set()), ("", [0, 0], {"race"})):
        data, flags, out = (np.zeros(4, np.uint32) for _ in range(3))
        reports = execute(
            body.format(fence=fence), data, flags, out, threads=64, blocks=3, schedule=schedule, late=True
        )
        assert (out[:2].tolist(), reports.kinds()) == (wanted, kinds)


@every_schedule
def test_a_store_over_a_released_value_tells_nothing_of_it(schedule):
    """Block 1 waits for the flag of block 0 and stores another; an atomic would hand on the order."""
    body = """
        setp.ne.u32 %p1, %r0, 0;
        @%p1 bra END;
        setp.eq.u32 %p2, %r1, 0;
        @%p2 bra FIRST;
        setp.eq.u32 %p4, %r1, 2;
        @%p4 bra LAST;
        AGAIN:
        ld.relaxed.gpu.global.b32 %r12, [%d1];
        setp.eq.u32 %p3, %r12, 0;
        @%p3 bra AGAIN;
        {over}
        st.relaxed.gpu.global.b32 [%d1+4], %r14;
        bra END;
        LAST:
        ld.relaxed.gpu.global.b32 %r12, [%d1+4];
        setp.eq.u32 %p3, %r12, 0;
        @%p3 bra LAST;
        ld.acquire.gpu.global.b32 %r12, [%d1];
        ld.global.b32 %r13, [%d0];
        st.global.b32 [%d2], %r13;
        bra END;
        FIRST:
        mov.b32 %r10, 7;
        st.global.b32 [%d0], %r10;
        mov.b32 %r11, 1;
        st.release.gpu.global.b32 [%d1], %r11;
        END:
    """
    stored = "mov.b32 %r14, 2; st.relaxed.gpu.global.b32 [%d1], %r14;"
    added = "mov.b32 %r14, 1; atom.relaxed.gpu.global.add.u32 %r15, [%d1], %r14;"
    for over, wanted, kinds in ((stored, 0, {"race"}), (added, 7, set())):
        data, flags, out = (np.zeros(2, np.uint32) for _ in range(3))
        reports = execute(body.format(over=over), data, flags, out, blocks=3, schedule=schedule, late=True)
        assert (int(out[0]), reports.kinds()) == (wanted, kinds)


# The last of four blocks to count adds up what all have stored.
LAST_BLOCK = """
    setp.eq.u32 %p1, %r0, 0;
    setp.eq.u32 %p3, %r0, 33;
    mul.wide.u32 %d10, %r1, 4;
    add.s64 %d10, %d10, %d0;
    add.u32 %r10, %r1, 10;
    @%p3 st.global.b32 [%d10], %r10;
    {barrier}
    mov.b32 %r11, 1;
    {before}
    @%p1 atom.global.{order}.add.u32 %r12, [%d1], %r11;
    {after}
    setp.eq.u32 %p2, %r12, 3;
    and.pred %p2, %p1, %p2;
    @%p2 ld.global.v4.b32 {{%r20, %r21, %r22, %r23}}, [%d0];
    add.u32 %r20, %r20, %r21;
    add.u32 %r20, %r20, %r22;
    add.u32 %r20, %r20, %r23;
    @%p2 st.global.b32 [%d2], %r20;
"""


@every_schedule
@pytest.mark.parametrize(
    ("change", "whole"),
    [
        ({}, True),
        ({"order": "gpu.relaxed", "before": FENCE, "after": FENCE}, True),
        ({"order": "gpu.release", "after": FENCE}, True),
        ({"order": "gpu.relaxed", "after": FENCE}, False),
        ({"order": "gpu.relaxed", "before": FENCE}, False),
        ({"order": "gpu.acquire"}, False),
        ({"order": "cta.acq_rel"}, False),
        ({"barrier": ""}, False),
    ],
    ids=lambda x: ", ".join(x.values()) if isinstance(x, dict) else "",
)
def test_the_last_block_adds_up_all(change, whole, schedule):
    parts, count, total = (np.zeros(n, np.uint32) for n in (4, 1, 1))
    text = {"barrier": "bar.sync 0;", "before": "", "order": "gpu.acq_rel", "after": "", **change}
    kinds = execute(
        LAST_BLOCK.format(**text), parts, count, total, threads=64, blocks=4, schedule=schedule, late=True
    ).kinds()
    assert count[0] == 4
    if whole:
        assert (int(total[0]), kinds) == (10 + 11 + 12 + 13, set())
    else:
        assert int(total[0]) < 10 + 11 + 12 + 13
        assert kinds == {"race"}


def test_a_lock_hands_over_what_it_guards():
    """Blocks add to one number while they hold a lock; without an order sums are lost."""
    body = """
        setp.ne.u32 %p1, %r0, 0;
        @%p1 bra END;
        mov.b32 %r10, 0;
        mov.b32 %r11, 1;
        AGAIN:
        atom.global.gpu.{take}.cas.b32 %r12, [%d1], %r10, %r11;
        setp.ne.u32 %p2, %r12, 0;
        @%p2 bra AGAIN;
        ld.global.b32 %r13, [%d0];
        add.u32 %r13, %r13, %r11;
        st.global.b32 [%d0], %r13;
        atom.global.gpu.{give}.exch.b32 %r14, [%d1], %r10;
        END:
    """
    for take, give, kinds in (("acquire", "release", set()), ("relaxed", "relaxed", {"race"})):
        total, lock = np.zeros(1, np.uint32), np.zeros(1, np.uint32)
        text = body.format(take=take, give=give)
        assert execute(text, total, lock, threads=32, blocks=5, late=True).kinds() == kinds
        assert (int(total[0]) == 5) == (not kinds)
