"""Rounding to TF32, which tensor cores do not do: they read the upper 19 bits of a float32.

What is dropped is always towards 0. Products of truncated operands are therefore too small, by a factor of
about 1 - 2^-10.4 on average, and that of the scores is not the one of exact cells, which are float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

INFINITY, QUIET = tl.constexpr(0x7F800000), tl.constexpr(0x00400000)
MAGNITUDE, KEPT, HALF = tl.constexpr(0x7FFFFFFF), tl.constexpr(0xFFFFE000), tl.constexpr(0x00001000)
LARGEST = tl.constexpr(0x7F7FF000)  # magnitudes from here on would be rounded to infinity


@triton.jit
def rounded_to_tf32(x):
    """The nearest values with 10 bits of mantissa, float32; of two that are as near the larger magnitude.

    That is cvt.rna.tf32.f32, but for the ends: a finite value stays finite, and a NaN is one also where its
    lower bits are dropped.
    """
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & MAGNITUDE
    nearest = tl.where(magnitude < LARGEST, bits + HALF, bits) & KEPT
    return tl.where(magnitude > INFINITY, bits | QUIET, nearest).to(tl.float32, bitcast=True)
