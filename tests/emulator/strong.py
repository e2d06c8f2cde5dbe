"""Atomics and strong loads: how threads of different blocks learn of each other.

A strong access reads and writes what all blocks agree on. A release offers at an address what its thread
knows, and an acquire that reads from there learns it. Relaxed ones tell nothing: no kernel here has fences.

Source: Parallel Thread Execution ISA, chapter 8 (memory consistency model): "Scope", "Morally strong
operations", "Release and acquire patterns", "Causality order"; chapter 9: "atom" and "ld".
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.emulator.order import Key

Array = NDArray[Any]

ATOMIC = {
    "add": lambda old, new: old + new,
    "max": max,
    "min": min,
    "or": lambda old, new: old | new,
    "and": lambda old, new: old & new,
}


class Strong:
    """What fences and strong accesses to the global memory of a machine do."""

    def __init__(self, machine: Any) -> None:
        self.machine = machine

    def atomic(
        self,
        threads: Any,
        address: Array,
        where: Array | None,
        how: str,
        order: str,
        scope: str,
        value: Array,
    ) -> Array:
        """One thread after the other, in the order of their numbers; at random where warps are."""
        machine, memory = self.machine, self.machine.global_memory
        width = value.itemsize
        lanes, places, region = memory.noted(threads, address, where, width)
        before = np.zeros(threads.n, value.dtype)
        if machine.schedule == "random":
            shuffled = np.array(machine.random.sample(range(lanes.size), lanes.size), np.int64)
            lanes, places, region = lanes[shuffled], places[shuffled], region[shuffled]

        for lane, place, number in zip(lanes, places, region, strict=True):
            view = memory.regions[number].views[width].view(value.dtype)
            at = (place - memory.bases[number]) // width
            before[lane] = view[at]
            self._read(threads, lane, int(place), order, scope)
            view[at] = ATOMIC[how](view[at], value[lane])
            self._write(threads, lane, int(place), order, scope)
        return before

    def load(
        self,
        threads: Any,
        address: Array,
        where: Array | None,
        width: int,
        count: int,
        order: str,
        scope: str,
    ) -> list[Array]:
        """ld.relaxed, ld.acquire and ld.volatile."""
        memory = self.machine.global_memory
        values: list[Array] = memory.load(threads, address, where, width, count, strong=True)
        for lane in range(threads.n) if where is None else np.flatnonzero(where):
            self._read(threads, lane, int(address[lane]), order, scope)
        return values

    @staticmethod
    def _keys(threads: Any, lane: int, place: int, scope: str) -> list[Key]:
        """Where an access finds what others have released: for the whole grid, and for its own block."""
        of_block = (place, int(threads.block[lane]))
        return [of_block] if scope == "cta" else [(place, None), of_block]

    def _read(self, threads: Any, lane: int, place: int, order: str, scope: str) -> None:
        warp, keys = int(threads.warp[lane]), self._keys(threads, lane, place, scope)
        if order in ("acquire", "acq_rel"):
            for key in keys:
                self.machine.clocks.acquire(warp, key)

    def _write(self, threads: Any, lane: int, place: int, order: str, scope: str) -> None:
        warp, keys = int(threads.warp[lane]), self._keys(threads, lane, place, scope)
        if order in ("release", "acq_rel"):
            for key in keys:
                self.machine.clocks.release(warp, key)
