"""Global and shared memory whose accesses are checked: bounds, alignment, order, what was never written."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.emulator.order import NOBODY, Clocks, Shadow

Array = NDArray[Any]

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class Region:
    """Bytes at an address, of which a kernel may touch those that are allowed."""

    def __init__(self, address: int, data: NDArray[np.uint8], allowed: NDArray[np.bool_] | None) -> None:
        self.address, self.size = address, data.size
        self.allowed = allowed
        self.views = views_of(data)


def views_of(data: NDArray[np.uint8]) -> dict[int, Array]:
    """Bytes as numbers of each width, without an end that is no multiple of it."""
    return {width: data[: data.size // width * width].view(kind) for width, kind in UNSIGNED.items()}


def region_at(address: int, size: int, allowed: NDArray[np.bool_] | None = None) -> Region:
    """Memory of this process."""
    data = np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8)
    return Region(address, data, allowed)


class Memory:
    """What loads and stores of one state space do.

    Args:
        machine: that runs the kernel, which faults are told.
        clocks: of the warps.
        regions: sorted by their addresses, without overlap.
        grain: the bytes of a cell, the smallest access that the kernel makes.
        written: whether all bytes count as written from the beginning.
    """

    def __init__(
        self, machine: Any, clocks: Clocks, regions: list[Region], grain: int, *, written: bool
    ) -> None:
        self.machine = machine
        self.regions = regions
        self.bases = np.array([r.address for r in regions], np.int64)
        self.ends = np.array([r.address + r.size for r in regions], np.int64)
        self.grain = grain
        counts = [-(-r.size // grain) for r in regions]
        self.first_cell = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self.shadow = Shadow(clocks, int(self.first_cell[-1]), written=written)

    def place(self, threads: Any, address: Array) -> Array:
        """Addresses, as a thread gives them, as those of regions."""
        return address.astype(np.int64)

    def load(
        self,
        threads: Any,
        address: Array,
        where: Array | None,
        width: int,
        count: int,
        *,
        strong: bool = False,
    ) -> list[Array]:
        """`count` values of `width` bytes each; 0 where a thread is not to load, or must not."""
        lanes, places, region = self._checked(threads, address, where, width, count)
        result = [np.zeros(threads.n, UNSIGNED[width]) for _ in range(count)]
        if lanes.size:
            cells = self._cells(places, region, width * count)
            warps = np.broadcast_to(threads.warp[lanes][:, None], cells.shape)
            faults = self.shadow.read(cells, warps, strong=strong)
            self.machine.traffic.update(self.traffic(threads, lanes, places, width * count))
            self._tell(threads, lanes, faults, address)
            for number, picked in _groups(region):
                view, at = self.regions[number].views[width], (places[picked] - self.bases[number]) // width
                for k in range(count):
                    result[k][lanes[picked]] = view[at + k]
        return result

    def noted(
        self, threads: Any, address: Array, where: Array | None, width: int
    ) -> tuple[Array, Array, Array]:
        """The threads of an atomic that may take part, their places, and the numbers of their regions."""
        lanes, places, region = self._checked(threads, address, where, width, 1)
        if lanes.size:
            cells = self._cells(places, region, width)
            warps = np.broadcast_to(threads.warp[lanes][:, None], cells.shape)
            self._tell(threads, lanes, self.shadow.write(cells, warps, strong=True), address)
        return lanes, places, region

    def store(
        self, threads: Any, address: Array, where: Array | None, values: list[Array], *, strong: bool = False
    ) -> None:
        """Each thread's values one after the other."""
        width, count = values[0].itemsize, len(values)
        lanes, places, region = self._checked(threads, address, where, width, count)
        if not lanes.size:
            return
        cells = self._cells(places, region, width * count)
        warps = np.broadcast_to(threads.warp[lanes][:, None], cells.shape)

        self.machine.traffic.update(self.traffic(threads, lanes, places, width * count))
        changes = np.zeros(lanes.size, bool)
        for number, picked in _groups(region):
            view, at = self.regions[number].views[width], (places[picked] - self.bases[number]) // width
            for k, value in enumerate(values):
                changes[picked] |= view[at + k] != value[lanes[picked]]
        # Where nothing changes nobody sees whether it was written.
        changed = changes[:, None] | ~self.shadow.written[cells]
        if changed.any():
            faults = self.shadow.write(cells[changed], warps[changed], strong=strong)
            self._tell(threads, np.repeat(lanes, cells.shape[1])[changed.ravel()], faults, address)

        for number, picked in _groups(region):
            view, at = self.regions[number].views[width], (places[picked] - self.bases[number]) // width
            different = np.zeros(picked.size, bool)
            here = lanes[picked]
            for k, value in enumerate(values):
                view[at + k] = value[here]
            for k, value in enumerate(values):
                different |= view[at + k] != value[lanes[picked]]
            if different.any():
                self.machine.report(
                    threads, "values", lanes[picked][different], address, "threads store different values"
                )

    def traffic(self, threads: Any, lanes: Array, places: Array, size: int) -> dict[str, int]:
        """What an access moves: sectors of 32 bytes, of which each warp asks for some."""
        return {"global sectors": np.unique(threads.warp[lanes].astype(np.int64) << 42 | places // 32).size}

    def _checked(
        self, threads: Any, address: Array, where: Array | None, width: int, count: int
    ) -> tuple[Array, Array, Array]:
        """The threads that take part and may, their places, and the numbers of the places' regions."""
        lanes = np.arange(threads.n) if where is None else np.flatnonzero(where)
        if not lanes.size:
            return lanes, lanes, lanes
        places = self.place(threads, address)[lanes]
        size = width * count

        region = np.searchsorted(self.bases, places, side="right") - 1
        inside = (region >= 0) & (places + size <= self.ends[region])
        for number in np.unique(region[inside]):
            allowed = self.regions[number].allowed
            if allowed is not None:
                here = np.flatnonzero(inside & (region == number))
                offsets = (places[here] - self.bases[number])[:, None] + np.arange(size)
                inside[here] = allowed[offsets].all(1)
        aligned = address[lanes].astype(np.uint64) % np.uint64(size) == 0
        if not inside.all():
            self.machine.report(
                threads, "bounds", lanes[~inside], address, f"{size} bytes in nobody's memory"
            )
        if not aligned.all():
            self.machine.report(threads, "alignment", lanes[~aligned], address, f"want a multiple of {size}")
        good = inside & aligned
        return lanes[good], places[good], region[good]

    def _cells(self, places: Array, region: Array, size: int) -> Array:
        """(threads, cells of each)"""
        first = self.first_cell[region] + (places - self.bases[region]) // self.grain
        return first[:, None] + np.arange(max(size // self.grain, 1))

    def _tell(self, threads: Any, lanes: Array, faults: dict[str, Array], address: Array) -> None:
        for kind, wrong in faults.items():
            if wrong.any():
                some = lanes[wrong.any(1)] if wrong.ndim == 2 else lanes[wrong]
                self.machine.report(threads, kind, np.unique(some), address, _DETAILS[kind])


_DETAILS = {
    "uninitialised": "nobody has written there",
    "pending": "an asynchronous copy to there is not waited for",
    "race": "nothing orders this after another warp's access",
    "proxy": "no fence.proxy.async is between a thread's store and this read of an asynchronous unit",
}


def _groups(region: Array) -> Iterable[tuple[int, Array]]:
    """Each region with the places of its accesses."""
    if (region == region[0]).all():
        return [(int(region[0]), np.arange(region.size))]
    return [(int(number), np.flatnonzero(region == number)) for number in np.unique(region)]


class Shared(Memory):
    """The shared memory of all blocks: that of a block is a part of one region."""

    def __init__(self, machine: Any, clocks: Clocks, blocks: int, size: int, grain: int) -> None:
        self.size = size
        self.stride = -(-size // 1024) * 1024
        data = np.zeros(max(blocks * self.stride, 8), np.uint8)
        super().__init__(machine, clocks, [Region(0, data, None)], grain, written=False)

    def traffic(self, threads: Any, lanes: Array, places: Array, size: int) -> dict[str, int]:
        """The wavefronts of an access.

        Words of one of the 32 banks follow each other, and so do parts of a warp that ask for 128 bytes each.
        """
        words = max(size // 4, 1)
        at_once = 32 // words  # lanes
        part = threads.number[lanes] // at_once
        word = places[:, None] // 4 + np.arange(words)
        asked = np.unique(np.broadcast_to(part[:, None], word.shape).astype(np.int64) << 32 | word)
        _, of_banks = np.unique(asked >> 32 << 5 | asked % 32, return_counts=True)
        bank_of_part = np.unique(asked >> 32 << 5 | asked % 32) >> 5
        first = np.flatnonzero(np.diff(bank_of_part, prepend=-1))
        return {"shared wavefronts": int(np.maximum.reduceat(of_banks, first).sum())}

    def place(self, threads: Any, address: Array) -> Array:
        inside = address.astype(np.int64)
        # What is beyond a block's own memory is nobody's, and not another block's.
        beyond = inside >= self.size
        return np.where(beyond, np.int64(2**40), inside + threads.block.astype(np.int64) * self.stride)


class Copies:
    """cp.async: bytes of global memory on their way to shared memory, in groups that are waited for.

    They are taken when they are issued and arrive when they are waited for, as late as they may.
    """

    def __init__(self, machine: Any) -> None:
        self.machine = machine
        self.groups = np.zeros(machine.threads_of_grid, np.int64)  # that each thread has committed
        self.pending: list[dict[str, Array]] = []

    def issue(
        self, threads: Any, to: Array, source: Array, where: Array | None, size: int, taken: Array | None
    ) -> None:
        """`taken` of `size` bytes of each thread; the rest are zeros."""
        shared, memory = self.machine.shared_memory, self.machine.global_memory
        wanted = np.ones(threads.n, bool) if where is None else where
        width = min(size, 8)
        has = wanted if taken is None else wanted & (taken > 0)
        values = memory.load(
            threads, source, has if taken is None else has & (taken == size), width, size // width
        )
        if taken is not None and (partial := has & (taken != size)).any():
            self._take_some(threads, source, partial, taken, values)
        lanes, places, region = shared._checked(threads, to, wanted, width, size // width)
        if not lanes.size:
            return
        cells = shared._cells(places, region, size)
        warps = np.broadcast_to(threads.warp[lanes][:, None], cells.shape)
        flat, of = cells.ravel(), warps.ravel()
        faults = shared.shadow.write(flat, of)
        shared.shadow.pending[flat] = of  # until the copy is waited for
        shared._tell(threads, np.repeat(lanes, cells.shape[1]), faults, to)
        self.pending.append(
            {
                "thread": threads.number[lanes],
                "group": self.groups[threads.number[lanes]],
                "places": places // width,
                "cells": cells,
                "warp": threads.warp[lanes],
                "values": np.stack([value[lanes] for value in values], 1),
            }
        )

    def _take_some(
        self, threads: Any, source: Array, partial: Array, taken: Array, values: list[Array]
    ) -> None:
        """The first `taken` bytes of those threads that take a part of their bytes."""
        memory, width = self.machine.global_memory, values[0].itemsize
        size = width * len(values)
        askew = np.flatnonzero(partial & (source.astype(np.uint64) % np.uint64(size) != 0))
        if askew.size:
            self.machine.report(threads, "alignment", askew, source, f"want a multiple of {size}")
        parts = np.stack(values, 1).view(np.uint8)  # (threads, size)
        for k in range(size):
            where = partial & (taken > k)
            if where.any():
                (loaded,) = memory.load(threads, source + np.uint64(k), where, 1, 1)
                parts[where, k] = loaded[where]
        for k, value in enumerate(values):
            value[:] = parts[:, k * width : (k + 1) * width].copy().view(value.dtype)[:, 0]

    def commit(self, threads: Any, where: Array | None) -> None:
        self.groups[threads.number if where is None else threads.number[where]] += 1

    def wait(self, threads: Any, pending: int) -> None:
        """All but the last `pending` groups of each thread arrive."""
        shared = self.machine.shared_memory
        waits = np.full(self.groups.shape, -1, np.int64)
        waits[threads.number] = self.groups[threads.number] - pending
        kept = []
        for copy in self.pending:
            arrives = copy["group"] < waits[copy["thread"]]
            if arrives.any():
                here = {name: x[arrives] for name, x in copy.items()}
                values = here["values"]
                view = shared.regions[0].views[values.itemsize]
                view[here["places"][:, None] + np.arange(values.shape[1])] = values
                cells = here["cells"]
                shared.shadow.pending[cells] = NOBODY
                warps = np.broadcast_to(here["warp"][:, None], cells.shape)
                shared.shadow.finish(cells, warps, shared.shadow.clocks.now(warps))
            if not arrives.all():
                kept.append({name: x[~arrives] for name, x in copy.items()})
        self.pending = kept
