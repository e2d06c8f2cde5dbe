"""Where blocks are not ordered by the memory model, what one reads of another's stores is a race."""

import numpy as np
import pytest

from tests.emulator.machine import SCHEDULES
from tests.emulator.small_kernels import execute

# Block 0 stores 7 and raises a flag; block 1 waits for the flag and takes what it sees.
MESSAGE = """
    mov.b32 %r11, 1;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra READER;
    mov.b32 %r10, 7;
    st.global.b32 [%d0], %r10;
    setp.eq.u32 %p3, %r0, 0;
    @%p3 atom.global.add.{write}.u32 %r12, [%d1], %r11;
    bra END;
    READER:
    ld.{read}.global.b32 %r12, [%d1];
    setp.eq.u32 %p2, %r12, 0;
    @%p2 bra READER;
    ld.global.b32 %r13, [%d0];
    st.global.b32 [%d2], %r13;
    END:
"""
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES)


@every_schedule
@pytest.mark.parametrize(
    ("write", "read", "kinds"),
    [
        ("release.gpu", "acquire.gpu", set()),
        ("acq_rel.gpu", "acquire.sys", set()),
        ("relaxed.gpu", "relaxed.gpu", {"race"}),
        ("release.cta", "acquire.gpu", {"race"}),
        ("release.gpu", "acquire.cta", {"race"}),
        ("relaxed.gpu", "acquire.gpu", {"race"}),
        ("release.gpu", "volatile", {"race"}),
    ],
)
def test_a_message_is_a_race_unless_both_sides_order_it(write, read, kinds, schedule):
    data, flag, out = (np.zeros(1, np.uint32) for _ in range(3))
    body = MESSAGE.format(write=write, read=read)
    assert execute(body, data, flag, out, threads=32, blocks=2, schedule=schedule).kinds() == kinds


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
    @%p1 atom.global.{order}.add.u32 %r12, [%d1], %r11;
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
        ({"order": "gpu.relaxed"}, False),
        ({"order": "gpu.release"}, False),
        ({"order": "gpu.acquire"}, False),
        ({"order": "cta.acq_rel"}, False),
        ({"barrier": ""}, False),
    ],
    ids=lambda x: ", ".join(x.values()) if isinstance(x, dict) else "",
)
def test_the_last_block_adds_up_all(change, whole, schedule):
    parts, count, total = (np.zeros(n, np.uint32) for n in (4, 1, 1))
    text = {"barrier": "bar.sync 0;", "order": "gpu.acq_rel", **change}
    body = LAST_BLOCK.format(**text)
    kinds = execute(body, parts, count, total, threads=64, blocks=4, schedule=schedule).kinds()
    assert count[0] == 4
    assert kinds == (set() if whole else {"race"})
    if whole:
        assert total[0] == 10 + 11 + 12 + 13
