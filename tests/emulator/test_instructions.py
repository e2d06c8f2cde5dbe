"""What instructions compute, against Python's integers, fractions and torch."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from tests.emulator.machine import StoppedError
from tests.emulator.small_kernels import execute, of_each_thread

EDGES = [0, 1, 2, 31, 32, 33, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFF, 0x12345678, 0xDEADBEEF]
FLOATS = np.array(
    [0.0, -0.0, 1.0, -1.5, 3.0e38, 1e-40, np.inf, -np.inf, np.nan, 2.5, -2.5, 0.1], dtype=np.float32
)


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
        ("mul.hi.s32 d, a, b;", lambda a, b: signed(a) * signed(b) >> 32),
        ("mul.hi.u32 d, a, b;", lambda a, b: a * b >> 32),
        ("mad.lo.s32 d, a, b, a;", lambda a, b: a * b + a),
        ("min.s32 d, a, b;", lambda a, b: min(signed(a), signed(b))),
        ("max.u32 d, a, b;", max),
        ("shl.b32 d, a, b;", lambda a, b: a << min(b, 32)),
        ("shr.u32 d, a, b;", lambda a, b: a >> min(b, 32)),
        ("shr.s32 d, a, b;", lambda a, b: signed(a) >> min(b, 31)),
        ("shf.l.wrap.b32 d, a, b, 7;", lambda a, b: (b << 32 | a) << 7 >> 32),
        ("shf.r.wrap.b32 d, a, b, 7;", lambda a, b: (b << 32 | a) >> 7),
        ("lop3.b32 d, a, b, a, 0x1A;", lambda a, b: _lop3(a, b, a, 0x1A)),
        ("bfe.u32 d, a, 5, 9;", lambda a, b: a >> 5 & 511),
        ("bfe.s32 d, a, 5, 9;", lambda a, b: signed(a >> 5 & 511, 9)),
        ("prmt.b32 d, a, b, 0x5410U;", lambda a, b: b << 16 | a & 0xFFFF),
        ("prmt.b32 d, a, b, 0x7632U;", lambda a, b: b & 0xFFFF0000 | a >> 16),
        ("clz.b32 d, a;", lambda a, b: 32 - a.bit_length()),
        ("popc.b32 d, a;", lambda a, b: a.bit_count()),
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


def _lop3(a, b, c, table):
    return sum((table >> ((a >> k & 1) << 2 | (b >> k & 1) << 1 | c >> k & 1) & 1) << k for k in range(32))


@pytest.mark.parametrize("name", ["quotient", "remainder"])
def test_division_of_integers_is_towards_zero(name):
    a, b = pairs()
    b[b == 0] = 7
    out = np.zeros(len(a), np.uint32)
    of_each_thread(f"{'div' if name == 'quotient' else 'rem'}.s32 d, a, b;", [a, b], out)
    for x, y, found in zip(map(int, a), map(int, b), map(int, out), strict=True):
        exact = int(Fraction(signed(x), signed(y)))
        wanted = exact if name == "quotient" else signed(x) - exact * signed(y)
        assert found == wanted & 0xFFFFFFFF


def float_pairs():
    a, b = np.meshgrid(FLOATS, FLOATS)
    return a.ravel()[:128].copy(), b.ravel()[:128].copy()


@pytest.mark.parametrize("compare", ["eq", "ne", "lt", "ge", "equ", "neu", "ltu", "geu", "num", "nan"])
def test_comparisons_of_floats(compare):
    """Those that end in u are true beside a NaN, the others false."""
    a, b = float_pairs()
    out = np.zeros(len(a), np.uint32)
    of_each_thread(f"setp.{compare}.f32 %p1, a, b; selp.b32 d, 1, 0, %p1;", [a, b], out)
    of_numbers = {"eq": "==", "ne": "!=", "lt": "<", "ge": ">="}
    for x, y, found in zip(a.tolist(), b.tolist(), out.tolist(), strict=True):
        unordered = x != x or y != y
        if compare in ("num", "nan"):
            wanted = unordered == (compare == "nan")
        elif unordered:
            wanted = compare.endswith("u")
        else:
            wanted = eval(f"x {of_numbers[compare[:2]]} y", {"x": x, "y": y})
        assert bool(found) == wanted, (x, y)


def test_sums_and_fused_products_that_are_rounded_towards_zero():
    draw = np.random.default_rng(0)
    a, b = draw.normal(size=(2, 256)).astype(np.float32)
    # Sums of which one part lies below the last place of the other, and of which one cancels.
    c = np.concatenate([draw.normal(size=64), 1e-12 * b[64:128], 1e12 * b[128:192], -(a * b)[192:]]).astype(
        "f4"
    )
    for instruction, exact in (
        ("add.rz.f32 d, a, c;", lambda x, y, z: Fraction(x) + Fraction(z)),
        ("fma.rz.f32 d, a, b, c;", lambda x, y, z: Fraction(x) * Fraction(y) + Fraction(z)),
    ):
        out = np.zeros(256, np.float32)
        of_each_thread(instruction, [a, b, c], out)
        for x, y, z, found in zip(a.tolist(), b.tolist(), c.tolist(), out, strict=True):
            wanted = exact(x, y, z)
            further = np.nextafter(found, np.float32(np.copysign(np.inf, float(wanted))))
            assert abs(Fraction(float(found))) <= abs(wanted) < abs(Fraction(float(further)))


def test_fused_products_that_are_rounded_down():
    draw = np.random.default_rng(0)
    a, b, c = draw.normal(size=(3, 256)).astype(np.float32)
    c[128:] *= 1e-12  # far below the last place of the product
    out = np.zeros(256, np.float32)
    of_each_thread("fma.rm.f32 d, a, b, c;", [a, b, c], out)
    for x, y, z, found in zip(a.tolist(), b.tolist(), c.tolist(), out, strict=True):
        above = np.nextafter(found, np.float32(np.inf))
        assert Fraction(float(found)) <= Fraction(x) * Fraction(y) + Fraction(z) < Fraction(float(above))


def test_saturation_clamps_to_0_and_1():
    values = np.resize(FLOATS, 32)
    out = np.zeros(32, np.float32)
    of_each_thread("cvt.sat.f32.f32 d, a;", [values], out)
    assert out.tolist() == [x if 0 <= x <= 1 else float(x > 1) for x in values.tolist()]


def test_bits_are_put_into_64():
    a, b = np.random.default_rng(0).integers(2**64, size=(2, 32), dtype=np.uint64)
    for position, length in ((32, 32), (60, 8), (3, 0), (0, 64)):
        out = np.zeros(32, np.uint64)
        of_each_thread(f"bfi.b64 d, a, b, {position}, {length};", [a, b], out)
        mask = (2**length - 1) << position & (2**64 - 1)
        wanted = [y & ~mask | x << position & mask for x, y in zip(a.tolist(), b.tolist(), strict=True)]
        assert out.tolist() == wanted


@pytest.mark.parametrize(
    ("instruction", "meant"),
    [
        ("add{} d, a, b;", lambda a, b, c: a + b),
        ("sub{} d, a, b;", lambda a, b, c: a - b),
        ("mul{} d, a, b;", lambda a, b, c: a * b),
        ("fma.rn{} d, a, b, c;", lambda a, b, c: a * b + c),
    ],
    ids=["add", "sub", "mul", "fma"],
)
def test_arithmetic_of_bfloat16(instruction, meant):
    """In float64, which has all digits of a result, but for parts far below its last place."""
    generator = torch.Generator().manual_seed(0)
    a, b, c = torch.randn(3, 256, generator=generator).bfloat16()
    c[:64] *= 2.0**-12
    c[64:128] = -(a * b)[64:128]
    wanted = meant(a.double(), b.double(), c.double()).bfloat16()
    for kind, bits in (("bf16", np.uint16), ("bf16x2", np.uint32)):
        out = np.zeros(256 * 2 // bits().itemsize, bits)
        inputs = [x.view(torch.int16).numpy().view(bits) for x in (a, b, c)]
        of_each_thread(instruction.format(f".{kind}"), inputs, out)
        found = torch.from_numpy(out.view(np.int16)).view(torch.bfloat16)
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_a_fused_product_is_rounded_once():
    draw = np.random.default_rng(0)
    a, b = draw.normal(size=(2, 128))
    c = -(a * b) * (1 + draw.integers(-2, 3, size=128) * 2.0**-52)
    out = np.zeros(128)
    of_each_thread("fma.rn.f64 d, a, b, c;", [a, b, c], out)
    wanted = [float(Fraction(x) * Fraction(y) + Fraction(z)) for x, y, z in zip(a, b, c, strict=True)]
    np.testing.assert_allclose(out, wanted, rtol=3e-16, atol=0)


@pytest.mark.parametrize(
    ("how", "source"),
    [
        ("bfly.b32 d, a, 5, 31, -1", lambda lane: lane ^ 5),
        ("idx.b32 d, a, 9, 31, -1", lambda lane: 9),
        ("down.b32 d, a, 4, 31, -1", lambda lane: lane + 4 if lane + 4 < 32 else lane),
        ("up.b32 d, a, 4, 0, -1", lambda lane: lane - 4 if lane >= 4 else lane),
    ],
)
def test_shuffles(how, source):
    a = np.arange(100, 164, dtype=np.uint32)
    out = np.zeros(64, np.uint32)
    of_each_thread(f"shfl.sync.{how};", [a], out)
    assert out.tolist() == [int(a[t // 32 * 32 + source(t % 32)]) for t in range(64)]


def test_a_shuffle_says_whether_its_lane_is_there():
    a, out = np.arange(100, 132, dtype=np.uint32), np.zeros(32, np.uint32)
    of_each_thread("shfl.sync.down.b32 %r90|%p1, a, 4, 31, -1; selp.b32 d, %r90, 7, %p1;", [a], out)
    assert out.tolist() == [*range(104, 132), 7, 7, 7, 7]


def test_a_shuffle_between_some_lanes_is_refused():
    with pytest.raises(NotImplementedError, match="want all lanes"):
        execute("mov.b32 %r9, 0xFFFF; shfl.sync.bfly.b32 %r10, %r0, 1, 31, %r9;")


def test_a_parameter_is_read_by_its_address():
    """As nvcc reads a structure's fields, two at once."""
    out = np.zeros(2, np.uint32)
    execute(
        "mov.b64 %d9, small_kernel_param_0; ld.param.v2.u32 {%r9, %r10}, [%d9];"
        "setp.eq.s32 %p1, %r0, 0; @%p1 st.global.v2.b32 [%d0], {%r9, %r10};",
        out,
    )
    assert out.view(np.uint64).item() == out.ctypes.data


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


def test_wide_products():
    a, b = pairs()
    for sign, read in (("u", int), ("s", lambda x: signed(int(x)))):
        out = np.zeros(len(a), np.uint64)
        of_each_thread(f"mul.wide.{sign}32 d, a, b;", [a, b], out)
        assert out.tolist() == [read(x) * read(y) % 2**64 for x, y in zip(a, b, strict=True)]


def test_a_number_beside_a_nan_is_the_extreme():
    a, b = float_pairs()
    out = np.zeros(len(a), np.float32)
    of_each_thread("max.f32 d, a, b;", [a, b], out)
    for x, y, found in zip(a.tolist(), b.tolist(), out.tolist(), strict=True):
        numbers = [z for z in (x, y) if z == z]
        assert found == max(numbers) if numbers else found != found


@pytest.mark.parametrize(
    ("instruction", "exact"), [("ex2.approx.ftz.f32", np.exp2), ("rcp.approx.ftz.f32", np.reciprocal)]
)
def test_an_approximation_is_off_by_at_most_two_units_and_by_more_than_none(instruction, exact):
    a = np.linspace(-3, 5, 128, dtype=np.float32)
    out = np.zeros(128, np.float32)
    of_each_thread(f"{instruction} d, a;", [a], out)
    units = np.abs(out - exact(a.astype(np.float64))) / np.spacing(np.abs(out))
    assert units.max() <= 2.5
    assert units.max() > 0.9
