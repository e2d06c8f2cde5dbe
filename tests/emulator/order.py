"""Which accesses are ordered: vector clocks of warps, and for each cell of memory its readers and writer.

An access happens before another if the same warp made both, or if the warp of the second has learnt, by
barriers, atomics and fences, of a time of the first's warp that is later than the first. Two accesses to a
cell that are not ordered, of which one changes it, are a race, in whatever order they were made here.

Source: Flanagan and Freund, "FastTrack: efficient and precise dynamic race detection", PLDI 2009; PTX ISA,
chapter 8 (memory consistency model).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.integer[Any]]
Key = tuple[int, int | None]  # an address, and the block for which something is released there, None for all

NOBODY = -1
MANY = -2


class Clocks:
    """What each warp of a grid knows of the others: times[w, v] is the last time of v that w knows of."""

    def __init__(self, blocks: int, warps: int) -> None:
        self.blocks, self.warps = blocks, warps
        self.times = np.zeros((blocks * warps, blocks * warps), np.int32)
        np.fill_diagonal(self.times, 1)
        self.fenced = np.zeros_like(self.times)  # the same of what was fenced for the asynchronous proxy
        self.released: dict[Hashable, Integers] = {}  # what has been released at an address

    def now(self, warps: Integers) -> Integers:
        """The warps' own times."""
        return self.times[warps, warps]

    def tick(self, warps: Integers) -> None:
        self.times[warps, warps] += 1

    def fence_proxy(self, warps: Integers) -> None:
        """fence.proxy.async: what the warps know of is in order before what asynchronous units do."""
        self.fenced[warps] = np.maximum(self.fenced[warps], self.times[warps])

    def barrier(self, warps: Integers) -> None:
        """All warps learn what any of them knows."""
        self.times[warps] = self.times[warps].max(0)
        self.fenced[warps] = self.fenced[warps].max(0)
        self.tick(warps)

    def release(self, warp: int, address: Hashable) -> None:
        """What the warp knows can be learnt at an address."""
        self._add(self.released, address, self._knowledge(warp))
        self.times[warp, warp] += 1

    def hand_on(self, place: Hashable, address: Hashable) -> None:
        """What has been released at a place can be learnt at an address from now on."""
        known = self.released.pop(place, None)
        if known is not None:
            self._add(self.released, address, known)

    def acquire(self, warps: Integers | int, address: Hashable) -> None:
        """Warps learn what was released there."""
        self._learn(warps, self.released.get(address))

    def _knowledge(self, warp: int) -> Integers:
        return np.stack([self.times[warp], self.fenced[warp]])

    def _learn(self, warps: Integers | int, known: Integers | None) -> None:
        if known is not None:
            self.times[warps] = np.maximum(self.times[warps], known[0])
            self.fenced[warps] = np.maximum(self.fenced[warps], known[1])

    @staticmethod
    def _add(to: dict[Any, Integers], key: Hashable, known: Integers) -> None:
        before = to.get(key)
        to[key] = known if before is None else np.maximum(before, known)


class Shadow:
    """Who has read and written each cell of a memory.

    Args:
        clocks: of the grid.
        cells: how many there are.
        written: whether all cells count as written before the kernel began.
    """

    def __init__(self, clocks: Clocks, cells: int, *, written: bool) -> None:
        self.clocks = clocks
        self.writer = np.full(cells, NOBODY, np.int32)
        self.written_at = np.zeros(cells, np.int32)
        self.written = np.full(cells, written)
        self.reader = np.full(cells, NOBODY, np.int32)
        self.read_at = np.zeros(cells, np.int32)
        self.pending = np.full(
            cells, NOBODY, np.int32
        )  # warps whose asynchronous copies to a cell are not waited for
        self.busy = np.zeros(cells, np.int32)  # asynchronous reads of a cell that are not waited for
        self.strong = np.zeros(cells, bool)  # whether a strong access has written it
        self.generic = np.zeros(cells, bool)  # whether a thread, and no asynchronous unit, has written it
        self.many: list[
            tuple[Integers, Integers, Integers]
        ] = []  # reads of cells that more than one warp has read

    def _ordered(self, warps: Integers, other: Integers, at: Integers) -> Any:
        """Whether warps have learnt of what others did at a time. Nobody's doing is before everything."""
        return (other == NOBODY) | (other == warps) | (self.clocks.times[warps, other] >= at)

    def read(
        self, cells: Integers, warps: Integers, *, asynchronous: bool = False, strong: bool = False
    ) -> dict[str, Any]:
        """Notes a read of cells by warps, arrays of one shape; what is wrong with it, as masks by kinds.

        A strong read need not come after a strong write, nor before one, and is not noted.
        """
        faults = {
            "uninitialised": ~self.written[cells],
            "pending": self.pending[cells] != NOBODY,
            "race": ~self._ordered(warps, self.writer[cells], self.written_at[cells]),
        }
        if asynchronous:
            writer = self.writer[cells]
            known = self.clocks.fenced[warps, writer] >= self.written_at[cells]
            faults["proxy"] = self.generic[cells] & (writer != NOBODY) & ~known
        if strong:
            faults["race"] &= ~self.strong[cells]
            return faults
        now = self.clocks.now(warps)
        before, at = self.reader[cells], self.read_at[cells]
        # A read before this one need not be known any more: who comes after this comes after it, too.
        replaced = (before != MANY) & self._ordered(warps, np.maximum(before, NOBODY), at)
        self.reader[cells[replaced]], self.read_at[cells[replaced]] = warps[replaced], now[replaced]
        # Of several warps that read a cell at once one has been noted.
        others = ~replaced | (self.reader[cells] != warps)
        if others.any():
            held = cells[others]
            single = self.reader[held] != MANY
            if single.any():
                self.many.append((held[single], self.reader[held[single]], self.read_at[held[single]]))
                self.reader[held] = MANY
            self.many.append((held, warps[others], now[others]))
        return faults

    def write(self, cells: Integers, warps: Integers, *, strong: bool = False) -> dict[str, Any]:
        """Notes that warps change cells."""
        faults = {
            "pending": (self.pending[cells] != NOBODY) | (self.busy[cells] > 0),
            "race": ~self._ordered(warps, self.writer[cells], self.written_at[cells]),
        }
        if strong:
            faults["race"] &= ~self.strong[cells]
        readers = self.reader[cells]
        single = readers >= 0
        if single.any():
            raced = ~self._ordered(warps[single], readers[single], self.read_at[cells[single]])
            faults["race"][single] |= raced
        if (readers == MANY).any():
            faults["race"] |= self._raced_with_many(cells, warps, readers == MANY)
        self.finish(cells, warps, self.clocks.now(warps), strong=strong)
        return faults

    def finish(
        self, cells: Integers, warps: Integers, at: Integers, *, generic: bool = True, strong: bool = False
    ) -> None:
        """Cells hold what warps, or units at their command, have written at a time of theirs."""
        self.writer[cells], self.written_at[cells] = warps, at
        self.generic[cells] = generic
        self.strong[cells] = strong
        self.written[cells] = True
        self.reader[cells] = NOBODY

    def _raced_with_many(self, cells: Integers, warps: Integers, asked: Any) -> Any:
        """Whether one of the many reads of a cell is not ordered before its write."""
        raced = np.zeros(cells.shape, bool)
        writer = np.full(self.writer.shape, NOBODY, np.int32)
        writer[cells[asked]] = warps[asked]
        found = np.zeros(self.writer.shape, bool)
        kept = []
        for held, readers, at in self.many:
            mine = writer[held]
            hit = mine != NOBODY
            if hit.any():
                bad = ~self._ordered(mine[hit], readers[hit], at[hit])
                found[held[hit][bad]] = True
                held, readers, at = held[~hit], readers[~hit], at[~hit]
            if held.size:
                kept.append((held, readers, at))
        self.many = kept
        raced[asked] = found[cells[asked]]
        return raced
