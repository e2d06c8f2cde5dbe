"""What instructions compute that numpy has no function for, on arrays of one element a thread.

Registers are arrays of bits: uint16, uint32, uint64, and bool for predicates.
Source: Parallel Thread Execution ISA, chapter 9 (instruction set), whose names the functions have.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.unsignedinteger]
Array = NDArray[np.generic]

F32_ULP = 2.0**-23  # of numbers in [1, 2)


def fma_f32(a: Array, b: Array, c: Array) -> Array:
    """a * b + c rounded once, but for rare cases in which rounding to float64 first changes it."""
    return (a.astype(np.float64) * b + c).astype(np.float32)


def fma_f64(a: Array, b: Array, c: Array) -> Array:
    """a * b + c, with the product in twice the digits (Dekker's), so that what cancels is right."""
    product = a * b
    split_a, split_b = a * 134217729.0, b * 134217729.0
    high_a, high_b = split_a - (split_a - a), split_b - (split_b - b)
    low_a, low_b = a - high_a, b - high_b
    error = ((high_a * high_b - product) + high_a * low_b + low_a * high_b) + low_a * low_b

    total = product + c
    of_c = total - product
    rounding = (product - (total - of_c)) + (c - of_c)
    corrected = total + (rounding + error)
    # Where a half has overflowed or nothing is finite, there is nothing to correct.
    return np.where(np.isfinite(corrected), corrected, total)


def _exact(a: Array, b: Array, c: Array) -> tuple[Array, Array]:
    """a * b + c of float32 in two parts, float64: the nearest number, and what is missing."""
    product, c = a.astype(np.float64) * b, np.float64(c)  # which is exact
    total = product + c
    of_c = total - product
    return total, (product - (total - of_c)) + (c - of_c)


def fma_rm(a: Array, b: Array, c: Array) -> Array:
    """a * b + c of float32, rounded towards minus infinity."""
    total, missing = _exact(a, b, c)
    nearest = total.astype(np.float32)
    above = (nearest > total) | ((nearest == total) & (missing < 0))
    return np.where(above & np.isfinite(total), np.nextafter(nearest, np.float32(-np.inf)), nearest)


def maximum(a: Array, b: Array, *, keeps_nan: bool) -> Array:
    """The larger of floats. 0.0 is above -0.0; beside a NaN the number is the result, unless NaN is kept."""
    larger = np.maximum(a, b) if keeps_nan else np.fmax(a, b)
    # Of zeros numpy returns the one or the other by their places.
    return np.where(a == b, np.where(np.signbit(a), b, a), larger)


def minimum(a: Array, b: Array, *, keeps_nan: bool) -> Array:
    """The smaller of floats, likewise."""
    smaller = np.minimum(a, b) if keeps_nan else np.fmin(a, b)
    return np.where(a == b, np.where(np.signbit(a), a, b), smaller)


def saturated(x: Array) -> Array:
    """.sat of a float: clamped to [0, 1], NaN as 0."""
    return np.where(np.isnan(x), x.dtype.type(0), np.clip(x, x.dtype.type(0), x.dtype.type(1)))


def flush(x: Array) -> Array:
    """.ftz: subnormal numbers become zeros of their sign."""
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)


def approximate(exact: Array, ulps: float, bits: Array) -> Array:
    """A result of .approx or .full, off by as much as the ISA allows, up or down as the operand's bits say.

    Args:
        exact: in float64.
        ulps: the largest error, in units of the last place of float32.
        bits: of the operand, uint32.
    """
    mixed = (bits * np.uint32(2654435761)) >> np.uint32(31)
    return (exact * (1.0 + (mixed.astype(np.float64) * 2 - 1) * (ulps * 0.5 * F32_ULP))).astype(np.float32)


def rcp_approx_f64(x: Array) -> Array:
    """rcp.approx.ftz.f64: the upper half of the reciprocal's bits."""
    return ((1.0 / x).view(np.uint64) & np.uint64(0xFFFFFFFF00000000)).view(np.float64)


def to_bf16(x: Array) -> Bits:
    """float32 to the bits of bfloat16, to nearest even, as uint16."""
    bits = x.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint32(0x7FFF), rounded).astype(np.uint16)


def from_bf16(x: Bits) -> Array:
    return (x.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_integer(x: Array, kind: type[np.signedinteger] | type[np.unsignedinteger]) -> Array:
    """A float, already rounded to a whole number, as an integer: clamped to its range, NaN as 0."""
    bounds = np.iinfo(kind)
    inside = np.nan_to_num(x.astype(np.float64), nan=0.0, posinf=np.inf, neginf=-np.inf)
    high, low = inside >= float(bounds.max), inside <= float(bounds.min)
    result = np.where(high | low, 0.0, inside).astype(kind)
    result[high], result[low] = bounds.max, bounds.min
    return result


def prmt(a: Bits, b: Bits, selector: int) -> Bits:
    """Four bytes of the eight of b:a, each replaced by its sign where bit 3 of its selector is set."""
    both = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    result = np.zeros(a.shape, np.uint64)
    for place in range(4):
        choice = selector >> (4 * place) & 15
        byte = (both >> np.uint64(8 * (choice & 7))) & np.uint64(255)
        if choice & 8:
            byte = np.where(byte >> np.uint64(7) != 0, np.uint64(255), np.uint64(0))
        result |= byte << np.uint64(8 * place)
    return result.astype(np.uint32)


def bfe(a: Array, position: Array, length: Array, *, signed: bool) -> Array:
    """`length` bits of a 32-bit a from `position` on, extended with zeros or with their sign."""
    position, length = (
        np.minimum(x & np.uint32(255), np.uint32(64)).astype(np.int64) for x in (position, length)
    )
    wide = a.view(np.int32).astype(np.int64) if signed else a.astype(np.int64)
    shifted = wide >> position
    length = np.minimum(length, 32)
    mask = (np.int64(1) << length) - np.int64(1)
    field = shifted & mask
    if signed:
        sign = np.where(length > 0, np.int64(1) << np.maximum(length - 1, 0), np.int64(0))
        field = (field ^ sign) - sign
    return (field & np.int64(0xFFFFFFFF)).astype(np.uint32)


def bfi(a: Bits, b: Bits, position: Array, length: Array) -> Bits:
    """b, with the lower `length` bits of a in place of its own from `position` on."""
    bits, one = 8 * a.itemsize, a.dtype.type(1)
    position, length = (x & np.uint32(255) for x in (position, length))
    ones = shift_left(np.full(a.shape, one), length, bits) - one
    mask = shift_left(ones, position, bits)
    return (b & ~mask) | (shift_left(a, position, bits) & mask)


def shift_left(a: Bits, by: Array, bits: int) -> Bits:
    """Shifts by as many bits as the type has, and more, give 0."""
    kind = a.dtype.type
    amount = np.minimum(by, np.uint32(bits - 1)).astype(a.dtype)
    return np.where(by < bits, a << amount, kind(0))


def shift_right(a: Array, by: Array, bits: int) -> Array:
    """The same to the right; signed numbers give their sign."""
    amount = np.minimum(by, np.uint32(bits - 1)).astype(a.dtype)
    if a.dtype.kind == "i":
        return a >> amount
    return np.where(by < bits, a >> amount, a.dtype.type(0))


def quotient(a: Array, b: Array) -> Array:
    """Division of integers, towards zero; what a GPU gives for a divisor of 0 is nothing to rely on."""
    if (b == 0).any():
        raise ZeroDivisionError("an integer is divided by 0")
    if a.dtype.kind == "u":
        return a // b
    whole = np.abs(a.astype(object) if a.dtype.itemsize == 8 else a.astype(np.int64)) // np.abs(
        b.astype(object) if b.dtype.itemsize == 8 else b.astype(np.int64)
    )
    return np.where((a < 0) != (b < 0), -whole, whole).astype(a.dtype)


def remainder(a: Array, b: Array) -> Array:
    """Of such a division; it has the sign of a."""
    return a - quotient(a, b) * b
