"""Threads share the matrix products of the extension, which are as exact as those of torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from fastqt.engines import ops
from tests.csrc.cpu.processors import bound

pytestmark = pytest.mark.skipif(ops.native_error is not None, reason=str(ops.native_error))


@contextmanager
def threads_of_torch(count: int) -> Iterator[None]:
    """Only products belong inside: ThreadSanitizer does not know the threads of torch's operations."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def own_level() -> int:
    best = torch.ops.fastqt.product_levels()[2]
    if best == 0:
        pytest.skip("there is no micro-kernel for this processor")
    return best


def bfloat16_level(name: str) -> int:
    """The level of these instructions for products of bfloat16 matrices, by vectors or by tiles."""
    best = torch.ops.fastqt.product_levels()[3]
    has_vectors = torch.cpu.get_capabilities().get("avx512_bf16", False)
    if name == "tiles":
        if best != 5:
            pytest.skip("this processor has no tiles")
        return 5
    if not (has_vectors and best):
        pytest.skip("this processor multiplies no matrices of bfloat16")
    return 4


of_bfloat16 = pytest.mark.parametrize("instructions", ["vectors", "tiles"])


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize(
    "shape", [(400, 300, 130), (3, 900, 500), (700, 5, 700), (1, 1, 2000), (70, 210, 2500)]
)
def test_threads_share_a_product(shape, threads):
    level, (m, n, k) = own_level(), shape
    generator = torch.Generator().manual_seed(m)
    a, b = torch.randn(m, k, generator=generator), torch.randn(k, n, generator=generator)
    before = torch.randn(m, n, generator=generator)
    outs = [torch.full((n, m), torch.nan).t(), torch.empty(m, n)]
    sums = [before.clone(), before.clone()]
    for count, out, added in zip((threads, 1), outs, sums, strict=True):
        with threads_of_torch(count):
            torch.ops.fastqt.own_product_(out, a, b, 2.0, False, level)
            torch.ops.fastqt.own_product_(added, a, b, 2.0, True, level)
    out, added = outs[0], sums[0]
    exact = 2 * (a.double() @ b.double())
    limit = 2 * torch.from_numpy(bound(a.numpy(), b.numpy())) + 2**-22 * exact.abs()
    assert ((out - exact).abs() <= limit).all()
    assert ((added - before - exact).abs() <= limit + 2**-22 * before.abs()).all()
    # Whatever a thread has of it, the terms of a number are added up in one order.
    assert torch.equal(*outs)
    assert torch.equal(*sums)


@pytest.mark.parametrize("shape", [(40, 70, 1024), (31, 256, 1500), (1, 5, 300), (700, 33, 90)])
def test_operands_that_are_read_in_place_have_the_bits_of_panels(shape):
    """Rows that are not adjacent are copied to panels, as are those that are a multiple of a page apart."""
    level, (m, n, k) = own_level(), shape
    a, b = torch.randn(m, k), torch.randn(k, n)
    apart = torch.empty(m, 2 * k)[:, ::2].copy_(a)
    adjacent_rows = a.t().contiguous().t()
    padded = torch.empty(m, k + 16)[:, :k].copy_(a)
    outs = [torch.empty(m, n) for _ in range(4)]
    for out, operand in zip(outs, (apart, a, adjacent_rows, padded), strict=True):
        torch.ops.fastqt.own_product_(out, operand, b, 1.0, False, level)
    assert all(torch.equal(out, outs[0]) for out in outs[1:])


@of_bfloat16
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 1, 1), (29, 50, 3), (13, 33, 2), (200, 70, 301), (16, 40, 4000), (49, 17, 0)]
)
def test_operands_may_be_rounded_to_bfloat16(m, n, k, transposed, instructions):
    level = bfloat16_level(instructions)
    generator = torch.Generator().manual_seed(k)
    a = torch.randn(k, m, generator=generator).t() if transposed else torch.randn(m, k, generator=generator)
    b = torch.randn(k, n, generator=generator)
    a[:1, :1] = 1 + 2**-8  # halfway between two numbers: to the even one
    before = torch.randn(m, n, generator=generator)
    out = before.clone()
    torch.ops.fastqt.own_product_(out, a, b, 1.0, True, level)
    a, b = a.bfloat16().float(), b.bfloat16().float()
    exact = before + a.double() @ b.double()
    limit = 2 * torch.from_numpy(bound(a.numpy(), b.numpy())) + 2**-22 * exact.abs()
    assert ((out - exact).abs() <= limit).all()


@of_bfloat16
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["rows", "columns", "neither", "odd strides"])
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 1, 1), (29, 50, 3), (13, 33, 2), (200, 71, 301), (16, 40, 4001), (15, 1100, 2049)]
)
def test_operands_in_bfloat16_are_rounded_once(m, n, k, layout, dtype, instructions):
    """Sums are in float32, also those of a result in bfloat16 that are longer than a block of the depth."""
    level = bfloat16_level(instructions)
    generator = torch.Generator().manual_seed(k)

    def operand(rows: int, columns: int) -> torch.Tensor:
        """Without memory after the last number, so that a sanitizer sees what is read beyond it."""
        if layout == "columns":
            return torch.randn(columns, rows, generator=generator).bfloat16().t()
        step, gap = {"rows": (1, 0), "neither": (3, 0), "odd strides": (1, 1 + columns % 2)}[layout]
        stride = columns * step + gap
        memory = torch.randn((rows - 1) * stride + (columns - 1) * step + 1, generator=generator).bfloat16()
        return memory.as_strided((rows, columns), (stride, step))

    a, b = operand(m, k), operand(k, n)
    out = torch.full((m, n + 1), torch.nan, dtype=dtype)[:, :n]
    torch.ops.fastqt.own_product_(out, a, b, 1.5, False, level)
    exact = 1.5 * (a.double() @ b.double())
    limit = 2 * torch.from_numpy(bound(a.float().numpy(), b.float().numpy())) + 2**-22 * exact.abs()
    if dtype is torch.bfloat16:
        limit += 2**-8 * (exact.abs() + limit)
    assert ((out - exact).abs() <= limit).all()


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="no file tells the processor's maker")
def test_vectors_of_bfloat16_are_used_but_on_processors_of_intel():
    """These multiply bfloat16 at half the rate of float32, but for their tiles."""
    _, bfloat16, _, best_bfloat16, _, slow = torch.ops.fastqt.product_levels()
    assert slow == ("GenuineIntel" in Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    if best_bfloat16 != 5:  # tiles
        assert bfloat16 == (0 if slow else best_bfloat16)


@pytest.mark.parametrize("bfloat16", [False, True])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_packed_matrices_have_the_same_products(bfloat16, threads):
    used, rounded, *_ = torch.ops.fastqt.product_levels()
    level = rounded if bfloat16 and rounded else used
    if level == 0:
        pytest.skip("nothing here is multiplied by the own products")
    generator = torch.Generator().manual_seed(0)
    for rows, depth, columns in ((300, 1100, 330), (3, 2500, 700), (40, 7, 1000)):
        left = torch.randn(rows, depth, generator=generator)
        matrix = torch.randn(columns, depth, generator=generator).t()
        out, packed_out = torch.empty(rows, columns), torch.empty(rows, columns)
        packed = torch.ops.fastqt.pack_matrix(matrix, rows, bfloat16)
        with threads_of_torch(threads):
            torch.ops.fastqt.own_product_(out, left, matrix, 1.0, False, level)
            torch.ops.fastqt.packed_product_(packed_out, left, matrix, packed, False, bfloat16)
        assert torch.equal(packed_out, out)


def test_operands_that_do_not_fit_are_refused():
    a, b, out = torch.zeros(2, 3), torch.zeros(3, 4), torch.zeros(2, 4)
    best = torch.ops.fastqt.product_levels()[2]
    mixed = (out, a.bfloat16(), b)
    for wrong in (
        mixed,
        (out, b, a),
        (out, a, a),
        (out.double(), a, b),
        (out[:, ::2], a, b[:, :2]),
        (out[0], a, b),
    ):
        with pytest.raises(RuntimeError, match=r"out(, a, b)?: want"):
            torch.ops.fastqt.own_product_(*wrong, 1.0, False, best)
    with pytest.raises(RuntimeError, match="level: 7 is not one of this processor"):
        torch.ops.fastqt.own_product_(out, a, b, 1.0, False, 7)
