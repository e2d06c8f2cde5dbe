"""What an H100 would take for a launch: a roofline of its tensor cores, instructions, L2 cache and memory.

Launches and kernels are given as `benchmarks.predict.estimate` stores them.
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
    tensor: float = 745e12  # bfloat16 operations, the middle of what cuBLAS sustains
    memory: float = 0.9 * 3.35e12
    l2: float = 7e12
    l2_size: int = 50 * 2**20
    clock: float = 1.7e9
    issue: int = 4  # warps' instructions a clock of a multiprocessor
    registers: int = 2**16  # of a multiprocessor, as the following
    threads: int = 2048
    shared: int = 228 * 1024
    reserved_shared: int = 1024  # a block
    fill: float = 1e-6  # seconds until a tile's first operands are there
    launch: float = 1.5e-6  # seconds that any launch takes in a CUDA graph


VENDOR_TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.88), (64, 256, 0.8))  # and their share of it
VENDOR_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # of the inner dimension


@dataclass(frozen=True)
class Time:
    seconds: float
    limit: str
    flops: float = 0.0
    bytes: float = 0.0


def blocks_per_multiprocessor(resources: Stored, rates: Rates) -> int:
    """How many programs of a kernel are resident at a time."""
    warps = resources["threads"] // 32
    # Registers are dealt out to warps by 256.
    registers = -(-resources["registers"] * 32 // 256) * 256 * warps
    shared = resources["shared"] + rates.reserved_shared
    return min(
        rates.registers // registers, rates.threads // resources["threads"], rates.shared // shared, 32
    )


def product_time(n: int, m: int, k: int, itemsize: int, out_bytes: float, rates: Rates) -> Time:
    """Of the vendor's, with the best of some tiles and splits; a tile keeps a multiprocessor busy."""
    flops, operands = 2.0 * n * m * k, float(itemsize * k * (n + m))
    found = []
    for rows, columns, share in VENDOR_TILES:
        tiles = math.ceil(n / rows) * math.ceil(m / columns)
        for split in VENDOR_SPLITS:
            waves = math.ceil(tiles * split / rates.multiprocessors)
            per_tile = 2.0 * rows * columns * math.ceil(k / split) * rates.multiprocessors
            tensor = waves * per_tile / (share * rates.tensor) + rates.fill
            parts = 0.0 if split == 1 else 2.0 * split * 4 * n * m
            moved = operands + out_bytes + parts
            memory = moved / rates.memory
            limit = "tensor cores" if tensor >= memory else "memory"
            found.append(Time(rates.launch + max(tensor, memory), limit, flops, moved))
    return min(found, key=lambda time: time.seconds)


def gemm_time(N: int, D: int, rates: Rates) -> float:
    """Three products of the loss's shapes with results in bfloat16."""
    shapes = ((N, N, D), (N, D, N), (N, D, N))
    return sum(product_time(n, m, k, 2, 2.0 * n * m, rates).seconds for n, m, k in shapes)


def scores_time(event: Stored, resources: Stored, rates: Rates) -> Time:
    """A tile's products and its other instructions overlap only where two programs share a multiprocessor."""
    rows, columns, D = event["rows"], event["columns"], event["width"]
    row_tiles, column_tiles = math.ceil(rows / event["tile"][0]), math.ceil(columns / event["tile"][1])
    tiles = row_tiles * column_tiles
    resident = max(blocks_per_multiprocessor(resources, rates), 1)
    tile_flops = 2.0 * event["tile"][0] * event["tile"][1] * D
    tensor = tile_flops * rates.multiprocessors / rates.tensor
    other = resources["sass"] * resources["threads"] / 32 / rates.issue / rates.clock
    if not resources["loads_ahead"]:
        other += math.ceil(D / event["step"]) * rates.fill
    waves = tiles / rates.multiprocessors if tiles > 8 * rates.multiprocessors else None
    waves = waves or math.ceil(tiles / rates.multiprocessors)
    per_tile = tensor + other + rates.fill if resident == 1 else max(tensor, other)
    groups = math.ceil(row_tiles / event["group"])
    streamed = event["itemsize"] * columns * D
    moved = event["itemsize"] * rows * D + streamed * (groups if streamed > rates.l2_size / 2 else 1)
    moved += event["itemsize"] * rows * columns if event["store"] else 4 * rows * column_tiles
    needs = {
        "tensor cores" if tensor >= other + rates.fill else "other instructions": waves * per_tile,
        "L2": tiles * event["itemsize"] * D * sum(event["tile"]) / rates.l2,
        "memory": moved / rates.memory,
    }
    limit = max(needs, key=lambda name: needs[name])
    return Time(rates.launch + needs[limit], limit, 2.0 * rows * columns * D, moved)


def event_time(event: Stored, kernels: Stored, rates: Rates) -> Time:
    kind = event["kind"]
    if kind == "product":
        out = event["n"] * event["m"] * event["out_itemsize"] * (2 if event["add"] else 1)
        return product_time(event["n"], event["m"], event["k"], event["itemsize"], out, rates)
    if event.get("redo"):
        return Time(rates.launch, "launch")
    if kind == "scores" and kernels[event["kernel"]]:
        return scores_time(event, kernels[event["kernel"]], rates)
    moved = event.get("bytes", 0)
    needs = {"launch": 0.0, "memory": moved / rates.memory}
    if event.get("passes") and kernels[event["kernel"]]:
        resources = kernels[event["kernel"]]
        warps = event["passes"] * resources["threads"] / 32
        needs["other instructions"] = (
            warps * resources["sass"] / rates.issue / rates.clock / rates.multiprocessors
        )
    limit = max(needs, key=lambda name: needs[name])
    spent = needs[limit]
    return Time(rates.launch + spent, limit if spent > rates.launch else "launch", bytes=moved)
