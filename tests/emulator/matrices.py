"""Matrix instructions of a warp: which lane holds which element of a fragment, and the product.

Source: Parallel Thread Execution ISA, "Warp Level Matrix Multiply-Accumulate Instructions", the figures of
the fragments of each shape.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.emulator.arithmetic import from_bf16

Array = NDArray[Any]

LANE = np.arange(32)
GROUP, IN_GROUP = LANE // 4, LANE % 4  # groupID and threadID_in_group of the manual

WARP = 32


@functools.cache
def fragment(shape: str, kind: str, operand: str) -> tuple[Array, Array]:
    """Rows and columns of the elements that each lane holds, (32, elements) each.

    Args:
        shape: m16n8k16 or another.
        kind: of the operands: bf16, f16 or tf32.
        operand: "a", "b" or "c", which the result has as well.
    """
    k = int(shape.split("k")[1])
    if shape.startswith("m16n8") and operand == "c":
        i = np.arange(4)
        return GROUP[:, None] + 8 * (i // 2), IN_GROUP[:, None] * 2 + i % 2
    if shape.startswith("m16n8") and kind in ("bf16", "f16") and k in (8, 16):
        i = np.arange(k // 2)
        if operand == "a":
            return GROUP[:, None] + 8 * (i // 2 % 2), IN_GROUP[:, None] * 2 + i % 2 + 8 * (i // 4)
        i = np.arange(k // 4)
        return IN_GROUP[:, None] * 2 + i % 2 + 8 * (i // 2), GROUP[:, None] + 0 * i
    if shape.startswith("m16n8") and kind == "tf32" and k in (4, 8):
        i = np.arange(k // 2)
        if operand == "a":
            return GROUP[:, None] + 8 * (i % 2), IN_GROUP[:, None] + 4 * (i // 2)
        i = np.arange(k // 4)
        return IN_GROUP[:, None] + 4 * i, GROUP[:, None] + 0 * i
    raise NotImplementedError(f"mma.{shape}.{kind}, operand {operand}")


def elements(registers: Sequence[Array], kind: str) -> Array:
    """What registers hold, (threads, elements) in float32.

    The hardware reads the upper 19 bits of an operand that is said to be of TF32, whatever the others are.
    """
    if kind == "tf32":
        return np.stack([(x & np.uint32(0xFFFFE000)).view(np.float32) for x in registers], 1)
    halves = np.stack(registers, 1).view(np.uint16)  # the lower half of a register first
    return from_bf16(halves) if kind == "bf16" else halves.view(np.float16).astype(np.float32)


def multiply(
    shape: str, kind: str, a: Sequence[Array], b: Sequence[Array], c: Sequence[Array]
) -> list[Array]:
    """a b + c of each warp, whose sums are exact before they are rounded once."""
    m, n, k = (int(x) for x in shape.replace("m", "").replace("n", " ").replace("k", " ").split())
    warps = len(c[0]) // WARP
    A, B = np.zeros((warps, m, k)), np.zeros((warps, k, n))
    for matrix, registers, name in ((A, a, "a"), (B, b, "b")):
        rows, columns = fragment(shape, kind, name)
        matrix[:, rows, columns] = elements(registers, kind).reshape(warps, WARP, -1)
    rows, columns = fragment(shape, kind, "c")
    product = (A @ B)[:, rows, columns].reshape(len(c[0]), -1)
    return [(product[:, place] + sums).astype(sums.dtype) for place, sums in enumerate(c)]
