"""What kernels ask of the emulator beyond the values of their losses, against integers of Python."""

import numpy as np
import pytest

from tests.emulator.machine import StoppedError
from tests.emulator.small_kernels import execute, of_each_thread

EDGES = [0, 1, 2, 31, 32, 33, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFF, 0x12345678, 0xDEADBEEF]


def signed(x, bits=32):
    return x - (1 << bits) if x >> (bits - 1) else x


def pairs():
    a, b = np.meshgrid(np.array(EDGES, np.uint32), np.array(EDGES, np.uint32))
    a, b = a.ravel()[:128].copy(), b.ravel()[:128].copy()
    return a, b


@pytest.mark.parametrize(
    ("instruction", "meant"),
    [
        ("add.s32 d, a, b;", lambda a, b: a + b),
        ("sub.s32 d, a, b;", lambda a, b: a - b),
        ("mul.lo.s32 d, a, b;", lambda a, b: a * b),
        ("mad.lo.s32 d, a, b, a;", lambda a, b: a * b + a),
        ("min.s32 d, a, b;", lambda a, b: min(signed(a), signed(b))),
        ("max.u32 d, a, b;", max),
        ("shl.b32 d, a, b;", lambda a, b: a << min(b, 32)),
        ("shr.u32 d, a, b;", lambda a, b: a >> min(b, 32)),
        ("shr.s32 d, a, b;", lambda a, b: signed(a) >> min(b, 31)),
        ("bfe.u32 d, a, 5, 9;", lambda a, b: a >> 5 & 511),
        ("bfe.s32 d, a, 5, 9;", lambda a, b: signed(a >> 5 & 511, 9)),
        ("prmt.b32 d, a, b, 0x5410U;", lambda a, b: b << 16 | a & 0xFFFF),
        ("prmt.b32 d, a, b, 0x7632U;", lambda a, b: b & 0xFFFF0000 | a >> 16),
        ("setp.lt.s32 %p1, a, b; selp.b32 d, a, b, %p1;", lambda a, b: min(a, b, key=signed)),
    ],
    ids=lambda x: x.split(" d")[0] if isinstance(x, str) else "",
)
def test_integers(instruction, meant):
    a, b = pairs()
    out = np.zeros(len(a), np.uint32)
    of_each_thread(instruction, [a, b], out)
    wanted = [meant(int(x), int(y)) & 0xFFFFFFFF for x, y in zip(a, b, strict=True)]
    assert out.tolist() == wanted


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("min", [-0.0, -0.0, -0.0, 0.0, -1.0, -0.0, 2.0, 2.0]),
        ("max", [0.0, 0.0, -0.0, 0.0, -0.0, 1.0, 2.0, 2.0]),
        ("min.NaN", [-0.0, -0.0, -0.0, 0.0, -1.0, -0.0, np.nan, np.nan]),
        ("max.NaN", [0.0, 0.0, -0.0, 0.0, -0.0, 1.0, np.nan, np.nan]),
    ],
)
def test_zeros_have_an_order_whatever_their_places(name, meant, dtype):
    """A maximum that lanes exchange must not depend on whose operand was the first."""
    a = np.array([0.0, -0.0, -0.0, 0.0, -0.0, 1.0, np.nan, 2.0] * 4, dtype)
    b = np.array([-0.0, 0.0, -0.0, 0.0, -1.0, -0.0, 2.0, np.nan] * 4, dtype)
    out = np.zeros(len(a), dtype)
    of_each_thread(f"{name}.f{8 * out.itemsize} d, a, b;", [a, b], out)
    np.testing.assert_array_equal(out, np.array(meant * 4, dtype))
    assert np.signbit(out[~np.isnan(out)]).tolist() == np.signbit([x for x in meant * 4 if x == x]).tolist()


@pytest.mark.parametrize(
    ("how", "source"),
    [
        ("bfly.b32 d, a, 5, 31, -1", lambda lane: lane ^ 5),
        ("idx.b32 d, a, 9, 31, -1", lambda lane: 9),
        ("up.b32 d, a, 3, 0, -1", lambda lane: lane - 3 if lane >= 3 else lane),
        # In halves of a warp: the lanes of the second do not read those of the first.
        ("up.b32 d, a, 3, 0x1000, -1", lambda lane: lane - 3 if lane % 16 >= 3 else lane),
    ],
)
def test_shuffles(how, source):
    a = np.arange(100, 164, dtype=np.uint32)
    out = np.zeros(64, np.uint32)
    of_each_thread(f"shfl.sync.{how};", [a], out)
    assert out.tolist() == [int(a[t // 32 * 32 + source(t % 32)]) for t in range(64)]


def test_a_shuffle_between_some_lanes_is_refused():
    with pytest.raises(NotImplementedError, match="want all lanes"):
        execute("mov.b32 %r9, 0xFFFF; shfl.sync.bfly.b32 %r10, %r0, 1, 31, %r9;")


@pytest.mark.parametrize("taken", [0, 6, 12, 16])
def test_a_copy_takes_a_part_of_its_bytes(taken):
    """The rest becomes 0 and is not read: the source ends behind what is taken."""
    source, out = np.arange(1, taken + 1, dtype=np.uint8), np.zeros(16, np.uint8)
    source = source if taken else np.zeros(16, np.uint8)
    body = f"""
        mov.b32 %r9, {taken};
        mov.b32 %r10, 0;
        setp.eq.u32 %p1, %r0, 0;
        @%p1 cp.async.cg.shared.global [%r10], [%d0], 16, %r9;
        cp.async.commit_group;
        cp.async.wait_group 0;
        @%p1 ld.shared.v2.b64 {{%d10, %d11}}, [%r10];
        @%p1 st.global.v2.b64 [%d1], {{%d10, %d11}};
    """
    reports = execute(body, source, out, shared=16)
    assert not len(reports), str(reports)
    assert out.tolist() == [*range(1, taken + 1), *[0] * (16 - taken)]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            "{ .param .b64 param0; st.param.b64 [param0+0], 16; call.uni __assertfail, (param0); }",
            "0x10",
        ),
        ("setp.ne.s32 %p1, %r0, 3; @%p1 bra END; trap; END:", "thread 3: trap"),
    ],
    ids=["assertion", "trap"],
)
def test_what_ends_a_launch(body, words):
    with pytest.raises(StoppedError, match=words):
        execute(body)


def test_what_is_unknown_is_refused():
    with pytest.raises(NotImplementedError, match=r"sin\.approx"):
        execute("sin.approx.f32 %r10, %r0;")
