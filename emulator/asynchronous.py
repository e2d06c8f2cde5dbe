"""What Hopper does beside its threads: copies of boxes of tensors, products of warp groups, and mbarriers.

A copy arrives, and a product's result is there, as late as the kernel allows. Until then shared memory that
is to be written counts as pending, memory that is read as busy, and the registers of a result hold NaN.

Source: Parallel Thread Execution ISA, "mbarrier", "cp.async.bulk.tensor", "Asynchronous Warpgroup Level
Matrix Multiply-Accumulate Instructions" with its figures of fragments, "Matrix Descriptor Format",
"Swizzling modes".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emulator.arithmetic import from_bf16
from emulator.matrices import GROUP, IN_GROUP, WARP, elements, fragment
from emulator.order import NOBODY

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
            self.machine.clocks.release(int(threads.warp[lane]), key)
            barrier.bytes += int(sizes[lane])
            barrier.missing -= 1
            if barrier.missing < 0:
                self.machine.report(
                    threads, "mbarrier", np.array([lane]), address, "more arrive than it expects"
                )
            self._complete(barrier)

    def arrived(self, key: int, size: int, warp: int) -> None:
        """Bytes of an asynchronous copy that a warp has issued."""
        barrier = self.known[key]
        self.machine.clocks.release(warp, key)
        barrier.bytes -= size
        self._complete(barrier)

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

    def _complete(self, barrier: MBarrier) -> None:
        if barrier.missing == 0 and barrier.bytes == 0:
            barrier.phase += 1
            barrier.missing = barrier.expected
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
    """cp.async.bulk.tensor between global and shared memory."""

    def __init__(self, machine: Any) -> None:
        self.machine = machine
        self.loads: list[tuple[Array, Array, Array, int, int, int]] = []
        self.stores: dict[int, list[tuple[Array, int]]] = {}  # of each thread, the cells and the group
        self.groups: dict[int, int] = {}

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
                    box, inside, first, last, int(threads.block[lane])
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

    def _bytes(self, box: TensorMap, rows: Array, first: int, last: int, block: int) -> Array:
        memory = self.machine.global_memory
        address = (
            box.address + rows[:, None] * box.stride + first * box.size + np.arange((last - first) * box.size)
        )
        number = int(np.searchsorted(memory.bases, address[0, 0], side="right")) - 1
        at = (address - memory.bases[number]).ravel()
        values: Array = memory.read(number, 1, at, np.full(at.size, block)).reshape(address.shape)
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

    def store(
        self, threads: Any, maps: Array, coordinates: Sequence[Array], source: Array, where: Array | None
    ) -> None:
        """What lies beyond the matrix is left out."""
        shared, memory = self.machine.shared_memory, self.machine.global_memory
        for lane in range(threads.n) if where is None else np.flatnonzero(where):
            box = self.machine.tensor_maps[int(maps[lane])]
            column, row = (int(x[lane]) for x in coordinates)
            places, cells = self._tile(threads, lane, int(source[lane]), box)
            warps = np.full(cells.shape, threads.warp[lane], np.int32)
            faults = shared.shadow.read(cells, warps, asynchronous=True)
            shared._tell(threads, np.full(cells.shape, lane), faults, source)
            shared.shadow.busy[cells] += 1
            data = shared.regions[0].views[1][places]
            inside, first, last = _inside(box, row, column)
            if inside.size and last > first:
                skipped = (first - column) * box.size
                part = data[inside - row, skipped : skipped + (last - first) * box.size]
                address = (
                    box.address + inside[:, None] * box.stride + first * box.size + np.arange(part.shape[1])
                )
                number = int(np.searchsorted(memory.bases, address[0, 0], side="right")) - 1
                at = (address - memory.bases[number]).ravel()
                of_block, of_warp = (np.full(at.size, x[lane]) for x in (threads.block, threads.warp))
                memory.write(number, at, part.ravel(), of_block, of_warp)
            thread = int(threads.number[lane])
            self.stores.setdefault(thread, []).append((cells, self.groups.get(thread, 0)))

    def commit(self, threads: Any, where: Array | None) -> None:
        for lane in range(threads.n) if where is None else np.flatnonzero(where):
            thread = int(threads.number[lane])
            self.groups[thread] = self.groups.get(thread, 0) + 1

    def wait(self, threads: Any, pending: int) -> None:
        """The shared memory that stores read, but for those of the last groups, is free again."""
        shadow = self.machine.shared_memory.shadow
        here = set(threads.number.tolist())
        for thread in here & self.stores.keys():
            done = self.groups.get(thread, 0) - pending
            for cells, group in self.stores[thread]:
                if group < done:
                    shadow.busy[cells] -= 1
                    shadow.read(cells, np.full(cells.shape, thread // WARP, np.int32))
            self.stores[thread] = [x for x in self.stores[thread] if x[1] >= done]


def _inside(box: TensorMap, row: int, column: int) -> tuple[Array, int, int]:
    """The rows of a box that the matrix has, and its first column and that after the last."""
    rows = np.arange(max(row, 0), min(row + box.box[0], box.shape[0]))
    return rows, max(column, 0), min(column + box.box[1], box.shape[1])


class Products:
    """wgmma: products of 64 rows by four warps, of which each makes 16."""

    def __init__(self, machine: Any) -> None:
        self.machine = machine
        self.groups = np.zeros(machine.threads_of_grid, np.int64)
        self.pending: list[dict[str, Any]] = []
        # Of registers that are not to be read yet, by the addresses of their arrays.
        self.results: dict[int, tuple[Array, dict[str, Any]]] = {}

    def multiply(
        self,
        threads: Any,
        n: int,
        kind: str,
        accumulators: Sequence[Array],
        a: Array | Sequence[Array],
        b: Array,
        add: Array,
        transposed: tuple[bool, bool],
    ) -> list[Array]:
        """d = a b + d, of 16 rows of each warp; `a` is a descriptor or a fragment in registers."""
        k = 32 // (4 if kind == "tf32" else 2)
        warps = threads.n // WARP
        first = np.arange(warps) * WARP
        read: list[Array] = []
        B, cells = self._matrix(threads, first, b, n, k, kind, transposed[1])
        read.append(cells)
        if isinstance(a, np.ndarray):
            A, cells = self._matrix(threads, first, a, 64, k, kind, transposed[0])
            read.append(cells)
            quarter = threads.warp_of_block[first].astype(np.int64) % 4
            rows = quarter[:, None] * 16 + np.arange(16)
            A = np.take_along_axis(A, rows[:, :, None], 1)
        else:
            A = np.zeros((warps, 16, k))
            at_rows, at_columns = fragment(f"m16n8k{k}", kind, "a")
            A[:, at_rows, at_columns] = elements(a, kind).reshape(warps, WARP, -1)

        i = np.arange(n // 2)
        rows, columns = GROUP[:, None] + 8 * (i // 2 % 2), 8 * (i // 4) + IN_GROUP[:, None] * 2 + i % 2
        product = np.einsum("wik,wjk->wij", A, B, optimize=True)[:, rows, columns].reshape(threads.n, -1)
        entry: dict[str, Any] = {
            "thread": int(threads.number[0]),
            "group": int(self.groups[threads.number[0]]),
            "registers": [],
            "read": read,
            "warps": threads.warp[first],
        }
        for place, accumulator in enumerate(accumulators):
            before = self.result_of(accumulator)
            result = (product[:, place] + np.where(add, before, np.float32(0))).astype(np.float32)
            self._keep(np.full(threads.n, np.nan, np.float32), result, entry)
        self.pending.append(entry)
        return list(entry["registers"])

    def _keep(self, register: Array, result: Array, entry: dict[str, Any]) -> None:
        """A register gets its result when a product is waited for."""
        entry["registers"].append(register)
        self.results[_place_of(register)] = result, entry

    def result_of(self, register: Array) -> Array:
        """What a register holds, or will hold."""
        waiting = self.results.get(_place_of(register))
        return register if waiting is None else waiting[0].view(register.dtype)

    def used(self, threads: Any, register: Array) -> None:
        """Reports that an instruction takes a register that is not to be read yet."""
        if _place_of(register) in self.results:
            details = "a product whose result it is is not waited for"
            self.machine.report(threads, "pending", np.arange(threads.n), None, details)

    def copied(self, registers: Sequence[Array], copy: Callable[[Sequence[Array]], Array]) -> Array:
        """A copy of registers, which gets what they will get."""
        copied = copy(registers)
        entry = next((self.results[k][1] for k in map(_place_of, registers) if k in self.results), None)
        if entry is not None:
            self._keep(copied, copy([self.result_of(x) for x in registers]), entry)
        return copied

    def _matrix(
        self, threads: Any, first: Array, descriptor: Array, rows: int, k: int, kind: str, transposed: bool
    ) -> tuple[Array, Array]:
        """Each warp's matrix in shared memory, (warps, rows, k) in float64, and the cells that it is in."""
        shared = self.machine.shared_memory
        size = 4 if kind == "tf32" else 2
        bits = descriptor[first].astype(np.int64)
        start, leading, stride = ((bits >> at & 0x3FFF) << 4 for at in (0, 16, 32))
        mode = 0 if not bits.size else {0: 0, 1: 3, 2: 2, 3: 1}[int(bits[0] >> 62 & 3)]
        if (bits >> 49 & 7).any():
            raise NotImplementedError("wgmma with a base offset")
        r, c = np.arange(rows)[:, None], np.arange(k)[None, :]
        pitch = 16 << mode  # bytes of a row of the swizzled pattern
        s, lead = stride[:, None, None], leading[:, None, None]
        if transposed:  # rows lie one after the other, pitch bytes of them, for each k
            per = pitch // size
            offset = (r % per) * size + (c % 8) * pitch + (c // 8) * s + (r // per) * lead
        elif mode == 0:
            per = 16 // size
            offset = (r % 8) * 16 + (c % per) * size + (r // 8) * s + (c // per) * lead
        else:
            offset = (r % 8) * pitch + (r // 8) * s + c * size
        address = swizzled(start[:, None, None] + offset, mode)
        if (address + size > shared.size).any():
            self.machine.report(threads, "bounds", np.array([0]), None, "a matrix beyond shared memory")
            address = address % (shared.size // 16 * 16)
        places = address + threads.block[first].astype(np.int64)[:, None, None] * shared.stride
        view = shared.regions[0].views[size]
        values = view[places // size]
        cells = np.sort((places // shared.grain).reshape(len(first), -1), 1)
        if shared.grain > size:
            cells = cells[:, :: shared.grain // size]
        warps = np.broadcast_to(threads.warp[first][:, None], cells.shape)
        faults = shared.shadow.read(cells, warps, asynchronous=True)
        shared._tell(threads, np.broadcast_to(first[:, None], cells.shape).ravel(), _flat(faults), None)
        np.add.at(shared.shadow.busy, cells.ravel(), 1)
        if kind == "tf32":
            return (values & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64), cells
        numbers = from_bf16(values) if kind == "bf16" else values.view(np.float16)
        return numbers.astype(np.float64), cells

    def commit(self, threads: Any) -> None:
        self.groups[threads.number] += 1

    def wait(self, threads: Any, pending: int) -> None:
        """Results of all but the last groups are there, and what they have read may be written."""
        shadow = self.machine.shared_memory.shadow
        here = set(threads.number.tolist())
        kept = []
        for product in self.pending:
            thread = product["thread"]
            if thread not in here or product["group"] >= self.groups[thread] - pending:
                kept.append(product)
                continue
            for register in product["registers"]:
                register[:] = self.results.pop(_place_of(register))[0].view(register.dtype)
            for cells in product["read"]:
                np.subtract.at(shadow.busy, cells.ravel(), 1)
                shadow.read(cells, np.broadcast_to(product["warps"][:, None], cells.shape))
        self.pending = kept


def _flat(faults: dict[str, Array]) -> dict[str, Array]:
    return {kind: wrong.ravel() for kind, wrong in faults.items()}


def _place_of(register: Array) -> int:
    return int(register.__array_interface__["data"][0])
