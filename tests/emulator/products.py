"""wgmma: products that groups of four warps on Hopper order, and that are made beside them.

A product's result is there as late as the kernel allows. Until then the shared memory that it reads counts as
busy, and the registers of its result hold NaN.

Source: Parallel Thread Execution ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions"
with its figures of fragments, "Matrix Descriptor Format", "Swizzling modes".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.emulator.arithmetic import from_bf16
from tests.emulator.asynchronous import swizzled
from tests.emulator.matrices import GROUP, IN_GROUP, WARP, elements, fragment

Array = NDArray[Any]


@dataclass
class Product:
    """What warps that were at one place ordered together; each of them waits for its own part.

    Attributes:
        warps: those that have not waited.
        groups: of each, the group in which it has committed the product.
        cells: of each, the cells of both matrices in shared memory, (warps, cells).
        registers: those of the result, and copies of them.
    """

    warps: Array
    groups: Array
    cells: list[Array]
    registers: list[Array] = field(default_factory=list)


@dataclass
class Result:
    """What a register will hold: of each thread, when the warps of the products have waited."""

    values: Array
    warps: Array  # of each thread
    products: list[Product]


class Products:
    """wgmma: products of 64 rows by four warps, of which each makes 16."""

    def __init__(self, machine: Any) -> None:
        self.machine = machine
        self.groups = np.zeros(machine.threads_of_grid, np.int64)
        self.pending: list[Product] = []
        # Of registers that are not to be read yet, by the addresses of their arrays.
        self.results: dict[int, Result] = {}

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
        sums = np.einsum("wik,wjk->wij", A, B, optimize=True)[:, rows, columns].reshape(threads.n, -1)

        product = Product(threads.warp[first], self.groups[threads.number[first]], read)
        for place, accumulator in enumerate(accumulators):
            before = self.result_of(accumulator)
            result = (sums[:, place] + np.where(add, before, np.float32(0))).astype(np.float32)
            self._keep(np.full(threads.n, np.nan, np.float32), Result(result, threads.warp, [product]))
        self.pending.append(product)
        return list(product.registers)

    def _keep(self, register: Array, result: Result) -> None:
        """A register gets its result when the products are waited for."""
        self.results[_place_of(register)] = result
        for product in result.products:
            product.registers.append(register)

    def result_of(self, register: Array) -> Array:
        """What a register holds, or will hold."""
        result = self.results.get(_place_of(register))
        return register if result is None else result.values.view(register.dtype)

    def used(self, threads: Any, register: Array) -> None:
        """Reports that an instruction takes a register that is not to be read yet."""
        if _place_of(register) in self.results:
            details = "a product whose result it is is not waited for"
            self.machine.report(threads, "pending", np.arange(threads.n), None, details)

    def copied(
        self, registers: Sequence[Array], copy: Callable[[Sequence[Array]], Array], warps: Array
    ) -> Array:
        """A copy of registers for threads of these warps, which gets what they will get."""
        copied = copy(registers)
        waiting = [self.results[k] for k in map(_place_of, registers) if k in self.results]
        products: list[Product] = []
        for product in (x for result in waiting for x in result.products):
            if not any(product is x for x in products) and np.isin(warps, product.warps).any():
                products.append(product)
        if products:
            self._keep(copied, Result(copy([self.result_of(x) for x in registers]), warps, products))
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
        kept = []
        for product in self.pending:
            before = self.groups[product.warps * WARP] - pending
            done = np.isin(product.warps, threads.warp) & (product.groups < before)
            if done.any():
                self._finish(product, done)
            if product.warps.size:
                kept.append(product)
        self.pending = kept

    def _finish(self, product: Product, done: Array) -> None:
        """The part of some of its warps is made."""
        shadow = self.machine.shared_memory.shadow
        warps, there = product.warps[done], ~done
        for cells in product.cells:
            read = cells[done]
            np.subtract.at(shadow.busy, read.ravel(), 1)
            shadow.read(read, np.broadcast_to(warps[:, None], read.shape))
        product.warps, product.groups = product.warps[there], product.groups[there]
        product.cells = [cells[there] for cells in product.cells]

        kept = []
        for register in product.registers:
            result = self.results[_place_of(register)]
            arrived = np.isin(result.warps, warps)
            register[arrived] = result.values.view(register.dtype)[arrived]
            if product.warps.size and np.isin(result.warps, product.warps).any():
                kept.append(register)
                continue
            result.products = [x for x in result.products if x is not product]
            if not result.products:
                del self.results[_place_of(register)]
        product.registers = kept

    def ended(self, threads: Any, leaves: Array) -> None:
        """Threads end, after which nobody can wait for their products."""
        making = [warp for product in self.pending for warp in product.warps]
        lanes = leaves & np.isin(threads.warp, making)
        if lanes.any():
            details = "the thread ends while its products read the shared memory"
            self.machine.report(threads, "pending", np.flatnonzero(lanes), None, details)


def _flat(faults: dict[str, Array]) -> dict[str, Array]:
    return {kind: wrong.ravel() for kind, wrong in faults.items()}


def _place_of(register: Array) -> int:
    return int(register.__array_interface__["data"][0])
