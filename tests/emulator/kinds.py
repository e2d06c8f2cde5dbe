"""The types of PTX as those of numpy, and constants of them.

Source: Parallel Thread Execution ISA, chapters 4.5 (constants) and 5.2 (types).
"""

from __future__ import annotations

import re
import struct
from typing import Any

import numpy as np

WIDTHS = {"8": np.uint8, "16": np.uint16, "32": np.uint32, "64": np.uint64}
KINDS: dict[str, type[np.generic]] = {
    **{f"{letter}{bits}": kind for letter in "ub" for bits, kind in WIDTHS.items()},
    **{"s8": np.int8, "s16": np.int16, "s32": np.int32, "s64": np.int64},
    **{"f16": np.float16, "f32": np.float32, "f64": np.float64, "bf16": np.uint16, "pred": np.bool_},
    **{"bf16x2": np.uint32, "f16x2": np.uint32, "tf32": np.uint32},
}
ROUNDINGS = {"rni": "rint", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}
ORDERED = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
ORDERED |= {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
OPPOSITE = {"eq": "!=", "ne": "==", "lt": ">=", "le": ">", "gt": "<=", "ge": "<"}

SPACES = ("param", "global", "shared", "shared__cta", "local")


def bits_of(kind: str) -> int:
    return int(re.sub(r"x2$", "", kind).lstrip("busftp")) if kind != "pred" else 1


def storage(kind: str) -> str:
    """The type that a register of this size is stored in."""
    return kind if kind == "pred" else f"b{8 * np.dtype(KINDS[kind]).itemsize}"


def is_float(kind: str) -> bool:
    return kind.startswith(("f", "bf"))


def immediate(text: str, kind: str) -> Any:
    """A constant as a scalar of a type: 0f3F800000, 0d3FF0000000000000, 0x10U, -7."""
    negative = text.startswith("-")
    text = text.lstrip("-").rstrip("U")
    if text[:2].lower() == "0f" and len(text) == 10:
        value: Any = np.float32(struct.unpack(">f", bytes.fromhex(text[2:]))[0])
        bits: Any = np.uint32(int(text[2:], 16))
    elif text[:2].lower() == "0d" and len(text) == 18:
        value = np.float64(struct.unpack(">d", bytes.fromhex(text[2:]))[0])
        bits = np.uint64(int(text[2:], 16))
    else:
        number = -int(text, 0) if negative else int(text, 0)
        if kind == "pred":
            return np.bool_(number != 0)
        width = np.dtype(KINDS[kind]).itemsize * 8
        return WIDTHS[str(width)](number % 2**width).view(KINDS[kind])
    if is_float(kind):
        return -value if negative else value
    return bits
