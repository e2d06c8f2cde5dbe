"""What an H100 would take for a launch: a roofline of its tensor cores, instructions, L2 cache and memory.

Launches and kernels are given as `benchmarks.predict.estimate` stores them. The products of the vendor's
library are in `products`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

Stored = dict[str, Any]  # a launch or a compiled kernel, as JSON has it


@dataclass(frozen=True)
class Rates:
    """What an H100 SXM is taken to do, a second and in bytes unless said otherwise."""

    multiprocessors: int = 132
    tensor: float = 745e12  # bfloat16 operations, the middle of what cuBLAS sustains in long products
    descriptors: float = 1.0  # share of it that a Triton kernel reaches that loads by descriptors
    pointers: float = 1 / 1.13  # the same of one that loads by pointers
    memory: float = 0.9 * 3.35e12
    l2: float = 7.9e12
    l2_size: int = 50 * 2**20
    l2_a_clock: int = 64  # that one multiprocessor reads from the L2 cache
    shared_a_clock: int = 128  # to a multiprocessor's shared memory
    clock: float = 1.7e9
    issue: int = 4  # warps' instructions a clock of a multiprocessor
    registers: int = 2**16  # of a multiprocessor, as the following
    threads: int = 2048
    shared: int = 228 * 1024
    reserved_shared: int = 1024  # a block
    fill: float = 1e-6  # seconds until the first operands of a new program are there
    refill: float = 0.6e-6  # seconds until those of a further tile of a program are
    drain: float = 0.54e-6  # seconds between two tiles' products of the vendor's, beside moving the result
    workspace: int = 32 * 2**20  # that torch gives cuBLAS on Hopper
    splits: int = 4  # of the inner dimension, at most
    launch: float = 1.5e-6  # seconds that any launch takes on the device, as in a CUDA graph
    host_triton: float = 40e-6  # seconds of Python before a Triton kernel without a graph
    host_torch: float = 6.5e-6  # the same before an operation of torch's


@dataclass(frozen=True)
class Time:
    seconds: float
    limit: str
    flops: float = 0.0
    bytes: float = 0.0


def longest(needs: dict[str, float]) -> tuple[str, float]:
    """What needs the longest time, and that time."""
    limit = max(needs, key=lambda name: needs[name])
    return limit, needs[limit]


def blocks_per_multiprocessor(resources: Stored, rates: Rates) -> int:
    """How many programs of a kernel are resident at a time."""
    warps = resources["threads"] // 32
    # Registers are dealt out to warps by 256.
    registers = -(-resources["registers"] * 32 // 256) * 256 * warps
    shared = resources["shared"] + rates.reserved_shared
    return min(
        rates.registers // registers, rates.threads // resources["threads"], rates.shared // shared, 32
    )


def scores_time(event: Stored, resources: Stored, rates: Rates) -> Time:
    """Of the scores' kernel, whose tiles come in whole waves; what the last wave stores is not hidden."""
    rows, columns, D, itemsize = event["rows"], event["columns"], event["width"], event["itemsize"]
    row_tiles, column_tiles = math.ceil(rows / event["tile"][0]), math.ceil(columns / event["tile"][1])
    tiles = row_tiles * column_tiles
    waves = math.ceil(tiles / rates.multiprocessors)

    tensor, other = tile_parts(event, resources, rates)
    first, further = starts(event, resources, rates)
    per_tile = max(tensor, other) if blocks_per_multiprocessor(resources, rates) > 1 else tensor + other

    groups = math.ceil(row_tiles / event["group"])
    streamed = itemsize * columns * D
    moved = itemsize * rows * D + streamed * (groups if streamed > rates.l2_size / 2 else 1)
    written = itemsize * rows * columns if event["store"] else 4 * rows * column_tiles
    last = written * (tiles - (waves - 1) * rates.multiprocessors) / tiles / rates.memory

    limit, spent = longest(
        {
            "tensor cores" if tensor >= other + further else "other instructions": (
                first + waves * per_tile + (waves - 1) * further
            ),
            "L2": tiles * itemsize * D * sum(event["tile"]) / event.get("multicast", 1) / rates.l2,
            "memory": (moved + written) / rates.memory - last,
        }
    )

    return Time(rates.launch + spent + last, limit, 2.0 * rows * columns * D, moved + written)


def tile_parts(event: Stored, resources: Stored, rates: Rates) -> tuple[float, float]:
    """Seconds of a tile's products, and of its other instructions as far as its own products hide none."""
    rows, columns = event["tile"]
    steps = math.ceil(event["width"] / event["step"])
    pace = rates.tensor * (rates.descriptors if event.get("descriptors") else rates.pointers)
    tensor = 2.0 * rows * columns * steps * event["step"] * rates.multiprocessors / pace
    other = resources["sass"] * resources["threads"] / 32 / rates.issue / rates.clock
    if event.get("lead"):
        # Two of three groups of warps compute, and each has half of the instructions. While one of them is in
        # its epilogue, the other one makes the products of the steps that it is ahead or behind.
        other = max(other / 3 - tensor * event["lead"] / steps, 0.0)
    if not resources["loads_ahead"]:
        other += steps * rates.fill
    return tensor, other


def starts(event: Stored, resources: Stored, rates: Rates) -> tuple[float, float]:
    """Seconds that nothing hides until a multiprocessor's first tile has operands, and each further one.

    A program for each tile starts anew for each. A persistent program waits for the operands alone, unless
    its loads run ahead of the tile before.
    """
    tiles = math.prod(
        math.ceil(size / tile)
        for size, tile in zip((event["rows"], event["columns"]), event["tile"], strict=True)
    )
    if event.get("lead") or event.get("ahead"):
        return rates.fill, 0.0
    if event.get("programs", tiles) < tiles:
        return rates.fill, rates.refill
    return rates.fill, 0.0 if blocks_per_multiprocessor(resources, rates) > 1 else rates.fill


def rows_time(event: Stored, kernels: Stored, rates: Rates) -> Time:
    """Of a kernel that visits rows, or of another operation: memory's, or that of its instructions."""
    moved, product = event.get("bytes", 0), event.get("product_bytes", 0)
    # A product that the launch before has written is still in the L2 cache if it is small enough.
    pace = rates.l2 if product <= rates.l2_size / 2 else rates.memory
    needs = {"launch": 0.0, "memory": moved / rates.memory + product / pace}
    if event.get("passes") and kernels[event["kernel"]]:
        resources = kernels[event["kernel"]]
        warps = event["passes"] * resources["threads"] / 32
        needs["other instructions"] = (
            warps * resources["sass"] / rates.issue / rates.clock / rates.multiprocessors
        )
    limit, spent = longest(needs)
    return Time(rates.launch + spent, limit if spent > rates.launch else "launch", bytes=moved + product)
