"""What Hopper does beside its threads: copies of boxes of tensors, and mbarriers, which tell of them.

A copy arrives as late as the kernel allows. Until then shared memory that is to be written counts as pending.
`products` has the products of warp groups.

Source: Parallel Thread Execution ISA, "mbarrier", "cp.async.bulk.tensor", "Swizzling modes".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.emulator.order import NOBODY

Array = NDArray[Any]


@dataclass
class MBarrier:
    """An mbarrier: arrivals and bytes that are missing before its phase is complete."""

    expected: int
    missing: int
    bytes: int = 0
    phase: int = 0


class MBarriers:
    """The mbarriers in the shared memory of all blocks, by their block and address."""

    def __init__(self, machine: Any) -> None:
        self.machine = machine
        self.known: dict[int, MBarrier] = {}

    @staticmethod
    def key(block: int, address: int) -> int:
        return block << 32 | address

    def _each(self, threads: Any, address: Array, where: Array | None) -> list[tuple[int, int]]:
        """The threads that take part, and the keys of their barriers."""
        lanes = range(threads.n) if where is None else np.flatnonzero(where)
        return [(int(lane), self.key(int(threads.block[lane]), int(address[lane]))) for lane in lanes]

    def init(self, threads: Any, address: Array, where: Array | None, count: int) -> None:
        for _, key in self._each(threads, address, where):
            self.known[key] = MBarrier(count, count)

    def inval(self, threads: Any, address: Array, where: Array | None) -> None:
        for lane, key in self._each(threads, address, where):
            if self.known.pop(key, None) is None:
                self.machine.report(threads, "mbarrier", np.array([lane]), address, "it was not initialised")

    def arrive(self, threads: Any, address: Array, where: Array | None, expected_bytes: int | Array) -> None:
        """Counts an arrival of each thread, after more bytes to wait for."""
        sizes = np.broadcast_to(expected_bytes, threads.n)
        for lane, key in self._each(threads, address, where):
            barrier = self._barrier(threads, lane, key, address)
            if barrier is None:
                continue
            self.machine.clocks.release(int(threads.warp[lane]), (key, "of this phase"))
            barrier.bytes += int(sizes[lane])
            barrier.missing -= 1
            if barrier.missing < 0:
                self.machine.report(
                    threads, "mbarrier", np.array([lane]), address, "more arrive than it expects"
                )
            self._complete(barrier, key)

    def arrived(self, key: int, size: int, warp: int) -> None:
        """Bytes of an asynchronous copy that a warp has issued."""
        barrier = self.known[key]
        self.machine.clocks.release(warp, (key, "of this phase"))
        barrier.bytes -= size
        self._complete(barrier, key)

    def waited(self, threads: Any, address: Array, parity: Array) -> Array:
        """mbarrier.try_wait.parity: whether the phase of this parity is complete. Others go to sleep."""
        result = np.zeros(threads.n, bool)
        keys = threads.block.astype(np.int64) << 32 | address.astype(np.int64)
        for key in np.unique(keys):
            lanes = np.flatnonzero(keys == key)
            barrier = self._barrier(threads, int(lanes[0]), int(key), address)
            if barrier is None:
                result[lanes] = True
                continue
            result[lanes] = (barrier.phase & 1) != (parity[lanes] & 1)
            awake = lanes[result[lanes]]
            if awake.size:
                self.machine.clocks.acquire(np.unique(threads.warp[awake]), int(key))
        threads.sleeps = not result.all()
        return result

    def _barrier(self, threads: Any, lane: int, key: int, address: Array) -> MBarrier | None:
        barrier = self.known.get(key)
        if barrier is None:
            self.machine.report(threads, "mbarrier", np.array([lane]), address, "it was not initialised")
        return barrier

    def _complete(self, barrier: MBarrier, key: int) -> None:
        """Begins the next phase if nothing is missing: who waits learns what was before."""
        if barrier.missing == 0 and barrier.bytes == 0:
            barrier.phase += 1
            barrier.missing = barrier.expected
            self.machine.clocks.hand_on((key, "of this phase"), key)
            self.machine.woken = True


def swizzled(address: Array, mode: int) -> Array:
    """Where a byte of a tile lies: bits 4 and up of its address, changed by those from 7 on.

    Args:
        mode: 0 for none, else 1, 2 or 3 for rows of 32, 64 or 128 bytes.
    """
    return address if mode == 0 else address ^ ((address >> 7 & (2**mode - 1)) << 4)


@dataclass(frozen=True)
class TensorMap:
    """What a copy engine is told of a matrix.

    Attributes:
        address: of its first element.
        shape, box: rows and columns of the matrix, and of what is copied at once.
        stride: bytes from one row to the next.
        size: bytes of an element.
        swizzle: the mode that `swizzled` takes.
    """

    address: int
    shape: tuple[int, int]
    stride: int
    box: tuple[int, int]
    size: int
    swizzle: int


class BulkCopies:
    """cp.async.bulk.tensor from global to shared memory."""

    def __init__(self, machine: Any) -> None:
        self.machine = machine
        self.loads: list[tuple[Array, Array, Array, int, int, int]] = []

    def _tile(self, threads: Any, lane: int, to: int, box: TensorMap) -> tuple[Array, Array]:
        """The places of a tile's bytes, (rows, bytes of a row), and the cells that they are in."""
        shared = self.machine.shared_memory
        rows, row_bytes = box.box[0], box.box[1] * box.size
        flat = to + np.arange(rows)[:, None] * row_bytes + np.arange(row_bytes)
        if to % 128 or flat[-1, -1] >= shared.size:
            self.machine.report(
                threads, "bounds", np.array([lane]), None, f"a tile at {to:#x} of shared memory"
            )
            flat = flat % max(shared.size, 1)
        places = swizzled(flat, box.swizzle) + int(threads.block[lane]) * shared.stride
        return places, np.unique(places // shared.grain)

    def load(
        self,
        threads: Any,
        to: Array,
        maps: Array,
        coordinates: Sequence[Array],
        barrier: Array,
        where: Array | None,
    ) -> None:
        """Zeros are what lies beyond the matrix."""
        shared = self.machine.shared_memory
        for lane in range(threads.n) if where is None else np.flatnonzero(where):
            box = self.machine.tensor_maps[int(maps[lane])]
            column, row = (int(x[lane]) for x in coordinates)
            places, cells = self._tile(threads, lane, int(to[lane]), box)
            data = np.zeros(places.shape, np.uint8)
            inside, first, last = _inside(box, row, column)
            if inside.size and last > first:
                skipped = (first - column) * box.size
                data[inside - row, skipped : skipped + (last - first) * box.size] = self._bytes(
                    box, inside, first, last
                )
            warp = int(threads.warp[lane])
            warps = np.full(cells.shape, warp, np.int32)
            faults = shared.shadow.write(cells, warps)
            shared._tell(threads, np.full(cells.shape, lane), faults, to)
            shared.shadow.pending[cells] = warp
            key = MBarriers.key(int(threads.block[lane]), int(barrier[lane]))
            now = int(self.machine.clocks.times[warp, warp])
            self.loads.append((places, data, cells, warp, now, key))
            self.machine.clocks.tick(np.array([warp]))

    def _bytes(self, box: TensorMap, rows: Array, first: int, last: int) -> Array:
        memory = self.machine.global_memory
        address = (
            box.address + rows[:, None] * box.stride + first * box.size + np.arange((last - first) * box.size)
        )
        number = int(np.searchsorted(memory.bases, address[0, 0], side="right")) - 1
        at = (address - memory.bases[number]).ravel()
        values: Array = memory.regions[number].views[1][at].reshape(address.shape)
        return values

    def deliver(self, which: int | None = None) -> bool:
        """Copies arrive: all, or one. Whether there was one."""
        arriving = self.loads if which is None else [self.loads[which]]
        self.loads = [] if which is None else [x for k, x in enumerate(self.loads) if k != which]
        shared = self.machine.shared_memory
        for places, data, cells, warp, at, key in arriving:
            shared.regions[0].views[1][places] = data
            shared.shadow.pending[cells] = NOBODY
            warps = np.full(cells.shape, warp, np.int32)
            shared.shadow.finish(cells, warps, np.full(cells.shape, at, np.int32), generic=False)
            self.machine.mbarriers.arrived(key, data.size, warp)
        return bool(arriving)

    def ended(self, threads: Any, last: Array) -> None:
        """Threads end as the last ones of their blocks, whose shared memory ends then, too."""
        arriving = [key >> 32 for *_, key in self.loads]
        lanes = last & np.isin(threads.block, arriving)
        if lanes.any():
            details = "the thread ends while copies have still to arrive in its block's shared memory"
            self.machine.report(threads, "pending", np.flatnonzero(lanes), None, details)


def _inside(box: TensorMap, row: int, column: int) -> tuple[Array, int, int]:
    """The rows of a box that the matrix has, and its first column and that after the last."""
    rows = np.arange(max(row, 0), min(row + box.box[0], box.shape[0]))
    return rows, max(column, 0), min(column + box.box[1], box.shape[1])
