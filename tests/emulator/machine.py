"""Runs the blocks of a grid: threads at the same place in the code together, in an order that can be chosen.

Blocks of threads ("CTA" in the manual) are called blocks here, and those of the code basic blocks.
"""

from __future__ import annotations

import random
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.emulator.asynchronous import BulkCopies, MBarriers, TensorMap
from tests.emulator.blocks import Translated, translate
from tests.emulator.flow import order_of_execution, polls
from tests.emulator.memory import UNSIGNED, Copies, Memory, Region, Shared, region_at
from tests.emulator.order import Clocks
from tests.emulator.products import Products
from tests.emulator.ptx import Kernel
from tests.emulator.reports import Report, Reports
from tests.emulator.strong import Strong
from tests.emulator.warps import WARP, Warps

Array = NDArray[Any]

# Whose turn it is. In lockstep all warps of all blocks do the same as long as they can. Otherwise one warp of
# each block goes on until it waits ("alone"), or until the end of a basic block, when any may ("random").
SCHEDULES = ("lockstep", "alone", "random")
# How often a group of four warps has a turn at random, relative to others. Where warps have different roles,
# some faults need one that is far ahead.
PACES = (0.1, 1, 10)
WARP_GROUP = 4

_PARAMETERS, _APART = 0x40000000, 0x1000  # the address of the first parameter, and to the next one's

PATIENCE = 2  # turns, of which one is of those who have not had one for longest


class StoppedError(Exception):
    """A kernel cannot go on: its threads wait for each other."""


class Threads:
    """Threads at the same place, sorted by their numbers in the grid, and what their registers hold."""

    def __init__(self, machine: Machine, number: Array, registers: dict[str, Array], at: int) -> None:
        self.machine = machine
        self.number, self.registers, self.block_of_code = number, registers, at
        self.n = number.size
        self.at = 0  # the instruction, within its basic block
        self.sleeps = False  # whether some wait for an mbarrier
        self.block = number // machine.threads
        in_block = number % machine.threads
        self.warp = (number // WARP).astype(np.int32)
        self.lane = (in_block % WARP).astype(np.uint32)
        self.warp_of_block = (in_block // WARP).astype(np.uint32)
        zero = np.zeros(self.n, np.uint32)
        self.tid = SimpleNamespace(x=in_block.astype(np.uint32), y=zero, z=zero)
        x, y, _ = machine.grid
        self.ctaid = SimpleNamespace(
            x=(self.block % x).astype(np.uint32),
            y=(self.block // x % y).astype(np.uint32),
            z=(self.block // (x * y)).astype(np.uint32),
        )

    def full(self, value: Any) -> Array:
        return np.full(self.n, value)

    def array(self, value: Any) -> Array:
        """A scalar as an array."""
        return value if getattr(value, "ndim", 0) else np.full(self.n, value)

    def some(self, chosen: Array, at: int) -> Threads:
        """Those of a mask, at another place."""
        if chosen.all():
            self.block_of_code = at
            return self
        copied, warps = self.machine.products.copied, self.warp[chosen]
        registers = {
            name: copied([x], lambda parts: parts[0][chosen], warps) for name, x in self.registers.items()
        }
        return Threads(self.machine, self.number[chosen], registers, at)

    @staticmethod
    def joined(several: Sequence[Threads]) -> Threads:
        """Threads at one place as one."""
        first = several[0]
        if len(several) == 1:
            return first
        number, warps = (np.concatenate([getattr(x, of) for x in several]) for of in ("number", "warp"))
        order = np.argsort(number, kind="stable")
        registers = {}
        for name in set().union(*(x.registers for x in several)):
            kind = next(x.registers[name].dtype.type for x in several if name in x.registers)
            parts = [x.registers[name] if name in x.registers else undefined(x.n, kind) for x in several]
            registers[name] = first.machine.products.copied(
                parts, lambda all_: np.concatenate(all_)[order], warps[order]
            )
        return Threads(first.machine, number[order], registers, first.block_of_code)


class Machine:
    """One launch of a kernel.

    Args:
        kernel: as `ptx.parse` gives it.
        grid: the blocks along x, y and z.
        arguments: of the kernel's parameters, by their places: integers, floats, or bytes.
        memory: what it may touch, without overlap.
        shared: the bytes of shared memory of a block, those of the module's own variables among them.
        reports: where faults go.
        schedule: one of SCHEDULES; "random" draws from `seed`.
        environment: what the driver tells the kernel in %envreg registers, by their numbers. In 1 and 2 a
            cooperative launch has the upper and the lower half of the address of the grid's barrier.
    """

    def __init__(
        self,
        kernel: Kernel,
        grid: tuple[int, int, int],
        arguments: Sequence[bytes],
        memory: Sequence[Region],
        shared: int,
        reports: Reports,
        schedule: str = "lockstep",
        seed: int = 0,
        translated: list[Translated] | None = None,
        tensor_maps: Mapping[str, TensorMap] | None = None,
        *,
        environment: Mapping[int, int] | None = None,
    ) -> None:
        self.kernel, self.grid, self.threads = kernel, grid, kernel.threads
        self.blocks = grid[0] * grid[1] * grid[2]
        self.threads_of_grid = self.blocks * self.threads
        self.reports, self.schedule, self.random = reports, schedule, random.Random(seed)
        self.code = translate(kernel) if translated is None else translated
        self.ranks = [*order_of_execution(kernel), len(kernel.blocks)]
        self.arguments = dict(zip(kernel.parameters, arguments, strict=True))
        self.ntid, self.nctaid = (
            SimpleNamespace(x=np.uint32(kernel.threads), y=np.uint32(1), z=np.uint32(1)),
            SimpleNamespace(**{axis: np.uint32(size) for axis, size in zip("xyz", grid, strict=True)}),
        )
        self.warps_of_block = self.threads // WARP
        self.paces = [self.random.choice(PACES) for _ in range(0, self.warps_of_block, WARP_GROUP)]
        self.clocks = Clocks(self.blocks, self.warps_of_block)
        self.environment = dict(environment or {})
        self.constants = {name: np.frombuffer(x, np.uint8).copy() for name, x in kernel.constants.items()}
        memory = [*memory, *(region_at(x.ctypes.data, x.size) for x in self.constants.values())]
        in_order = sorted(memory, key=lambda region: region.address)
        self.global_memory = Memory(self, self.clocks, in_order, grain(kernel, "global"), written=True)
        self.shared_memory = Shared(self, self.clocks, self.blocks, shared, grain(kernel, "shared"))
        self.copies, self.bulk = Copies(self), BulkCopies(self)
        self.mbarriers, self.products = MBarriers(self), Products(self)
        self.strong, self.warps = Strong(self), Warps(self)
        self.tensor_maps = {self.parameter_address(name): box for name, box in (tensor_maps or {}).items()}
        self.sleeping: list[Threads] = []
        self.woken = False  # whether an mbarrier has completed a phase since they went to sleep
        self.executed: Counter[int] = Counter()  # threads that have run each basic block
        self.traffic: Counter[str] = Counter()  # global sectors and shared wavefronts
        self.waiting: dict[
            tuple[int, int], list[Threads]
        ] = {}  # by the barrier's number and count, 0 for all
        self.alive = np.ones(self.threads_of_grid, bool)
        self.polls, self.turns = polls(kernel), 0

    def run(self) -> None:
        """Runs the grid to its end. Raises StoppedError if it has none."""
        every = Threads(self, np.arange(self.threads_of_grid), {}, 0)
        ready = [every] if self.schedule == "lockstep" else self._by_warps(every)
        with np.errstate(all="ignore"):
            while ready or self._something_arrives():
                if self.schedule == "random" and self.bulk.loads and self.random.random() < 0.3:
                    self.bulk.deliver(self.random.randrange(len(self.bulk.loads)))
                if self.woken:
                    ready, self.sleeping, self.woken = [*ready, *self.sleeping], [], False
                if ready:
                    ready = self._step(ready)
        if self.alive.any():
            where = {number: sum(x.n for x in threads) for number, threads in self.waiting.items() if threads}
            asleep = sum(x.n for x in self.sleeping)
            raise StoppedError(
                f"{self.kernel.name}: threads wait for ever: at barriers {where}, for mbarriers {asleep}"
            )

    def _something_arrives(self) -> bool:
        """Whether there is a copy that arrives now that nobody can go on without it."""
        return self.woken or self.bulk.deliver()

    def _by_warps(self, threads: Threads) -> list[Threads]:
        """The same warp of all blocks goes on at once."""
        return [
            threads.some(threads.warp_of_block == w, threads.block_of_code)
            for w in range(self.warps_of_block)
        ]

    def _step(self, ready: list[Threads]) -> list[Threads]:
        """One basic block of some threads; what is ready afterwards."""
        chosen, others = self._turn(ready)
        at = chosen.block_of_code
        if at >= len(self.code):
            self._end(chosen, np.ones(chosen.n, bool))
            return others + self._released()

        code = self.code[at]
        self.executed[at] += chosen.n
        taken = code.run(self, chosen, chosen.registers)
        end, sleeps, chosen.sleeps = code.end, chosen.sleeps, False
        if end is None:
            return [*others, chosen.some(np.ones(chosen.n, bool), at + 1)]
        if end.name == "bra":
            if sleeps and taken is not None and code.block.instructions[-2].name == "mbarrier":
                # They look at the mbarrier again when one has changed.
                self.sleeping.append(chosen.some(taken, code.target))
                return [*others, *([] if taken.all() else [chosen.some(~taken, at + 1)])]
            return [*others, *self._branched(chosen, taken, code)]
        if end.name == "brx":
            table = [self.kernel.labels[x] for x in self.kernel.tables[str(end.operands[1])]]
            return [*others, *(chosen.some(taken == k, table[k]) for k in np.unique(taken))]
        if end.name in ("ret", "exit"):
            leaves = np.ones(chosen.n, bool) if taken is None else taken
            stays = [] if leaves.all() else [chosen.some(~leaves, at + 1)]
            if leaves.any():
                self._end(chosen, leaves)
                return [*others, *stays, *self._released()]
            return [*others, *stays]
        return [*others, *self._barrier(chosen, end.operands, at)]

    def _turn(self, ready: list[Threads]) -> tuple[Threads, list[Threads]]:
        """Which threads go on: those of the warp whose turn it is that are furthest behind.

        Those behind may wait in a loop for what others are to store, so that now and then others have a turn.
        """
        self.turns += 1
        if (
            self.polls
            and self.turns % PATIENCE == 0
            and (longest := self._turn_of_longest(ready)) is not None
        ):
            return longest
        if self.schedule == "lockstep":
            candidates = ready
        else:
            warps = sorted({int(x.warp_of_block[0]) for x in ready})
            paces = [self.paces[warp // WARP_GROUP] for warp in warps]
            turn = warps[0] if self.schedule == "alone" else self.random.choices(warps, paces)[0]
            candidates = [x for x in ready if x.warp_of_block[0] == turn]
        behind = min(candidates, key=lambda threads: self.ranks[threads.block_of_code]).block_of_code
        same = [x for x in candidates if x.block_of_code == behind]
        chosen = Threads.joined(same)
        taken = {id(x) for x in same}
        return chosen, [x for x in ready if id(x) not in taken]

    def _turn_of_longest(self, ready: list[Threads]) -> tuple[Threads, list[Threads]] | None:
        """Of threads that have been ready for longest those of whose warps no part is behind, if any."""
        for at, warp in dict.fromkeys((x.block_of_code, self._warp_of(x)) for x in ready):
            here = Threads.joined([x for x in ready if (x.block_of_code, self._warp_of(x)) == (at, warp)])
            others = [x for x in ready if (x.block_of_code, self._warp_of(x)) != (at, warp)]
            behind = [x.warp for x in others if self.ranks[x.block_of_code] < self.ranks[at]]
            waits = np.isin(here.warp, np.concatenate([here.warp[:0], *behind]))
            if not waits.all():
                stay = [here.some(waits, at)] if waits.any() else []
                return here.some(~waits, at), [*others, *stay]
        return None

    def _warp_of(self, threads: Threads) -> int:
        """The warp of each block that these threads are of, which stay apart unless all go in lockstep."""
        return 0 if self.schedule == "lockstep" else int(threads.warp_of_block[0])

    def _branched(self, threads: Threads, taken: Array | None, code: Translated) -> list[Threads]:
        assert code.target is not None
        at = code.block.number
        if taken is None or taken.all():
            return [threads.some(np.ones(threads.n, bool), code.target)]
        if not taken.any():
            return [threads.some(~taken, at + 1)]
        # The second may reuse nothing of the first: both are copies.
        return [threads.some(taken, code.target), threads.some(~taken, at + 1)]

    def _end(self, threads: Threads, leaves: Array) -> None:
        """Some threads end, and with the last of a block its shared memory."""
        # Those for whom no code is left have ended at the last instruction that there is.
        threads.block_of_code = min(threads.block_of_code, len(self.code) - 1)
        threads.at = len(self.code[threads.block_of_code].block.instructions) - 1

        self.alive[threads.number[leaves]] = False
        some_left = self.alive.reshape(self.blocks, self.threads).any(1)
        self.products.ended(threads, leaves)
        self.bulk.ended(threads, leaves & ~some_left[threads.block])

    def _barrier(self, threads: Threads, operands: Sequence[Any], at: int) -> list[Threads]:
        """Threads arrive at a barrier of their block; those go on for which it is complete."""
        number = int(str(operands[0])) if operands else 0
        count = int(str(operands[1])) if len(operands) > 1 else 0
        self.whole_warps(threads, len(self.code[at].block.instructions) - 1)
        threads.block_of_code = at + 1
        self.waiting.setdefault((number, count), []).append(threads)
        return self._released()

    def _released(self) -> list[Threads]:
        """Threads whose barrier is complete, now that some have arrived or ended."""
        ready: list[Threads] = []
        alive = self.alive.reshape(self.blocks, self.threads).sum(1)
        for (number, count), waiting in list(self.waiting.items()):
            arrived = np.zeros(self.blocks, np.int64)
            for some in waiting:
                arrived += np.bincount(some.block, minlength=self.blocks)
            complete = arrived >= (count or alive)
            complete &= arrived > 0
            if not complete.any():
                continue
            freed = [
                x.some(complete[x.block], x.block_of_code) for x in list(waiting) if complete[x.block].any()
            ]
            kept = [
                x.some(~complete[x.block], x.block_of_code) for x in waiting if not complete[x.block].all()
            ]
            self.waiting[number, count] = kept
            for block in np.flatnonzero(complete):
                warps = np.unique(np.concatenate([x.warp[x.block == block] for x in freed]))
                self.clocks.barrier(warps)
            for at in sorted({x.block_of_code for x in freed}):
                joined = Threads.joined([x for x in freed if x.block_of_code == at])
                ready += (
                    [joined] if self.schedule == "lockstep" else [x for x in self._by_warps(joined) if x.n]
                )
        return ready

    # What instructions call.

    def keep(self, registers: dict[str, Array], alive: frozenset[str]) -> None:
        """Drops the registers that nobody reads any more."""
        for name in registers.keys() - alive:
            del registers[name]

    def undefined(self, threads: Threads, kind: Any) -> Array:
        return undefined(threads.n, kind)

    def report(self, threads: Threads, kind: str, lanes: Array, address: Array | None, details: str) -> None:
        """Notes a fault of some threads at the instruction that they execute."""
        instruction = self.code[threads.block_of_code].block.instructions[threads.at]
        lane = int(lanes[0])
        where = f"block {threads.block[lane]}, thread {threads.number[lane] % self.threads}"
        place = "" if address is None else f", address {int(np.broadcast_to(address, threads.n)[lane]):#x}"
        report = Report(
            kind, self.kernel.name, instruction.line, instruction.text, f"{where}{place}: {details}"
        )
        self.reports.add(report, lanes.size)

    def parameter(self, name: str, offset: int, kind: Any) -> Any:
        size = np.dtype(kind).itemsize
        return np.frombuffer(self.arguments[name][offset : offset + size], kind)[0]

    def parameter_address(self, name: str) -> int:
        """Where a parameter lies, for those of which the address is taken."""
        return _PARAMETERS + _APART * list(self.kernel.parameters).index(name)

    def parameters_at(self, address: Array, kind: Any) -> Array:
        """What lies at addresses of parameters, each thread's own."""
        names, (places, of_threads) = list(self.kernel.parameters), np.unique(address, return_inverse=True)
        numbers, offsets = np.divmod(places.astype(np.int64) - _PARAMETERS, _APART)
        values = [self.parameter(names[n], offset, kind) for n, offset in zip(numbers, offsets, strict=True)]
        return np.array(values, kind)[of_threads]

    def constant_address(self, name: str) -> int:
        """Where an initialised variable of the module lies."""
        return int(self.constants[name].ctypes.data)

    def text_at(self, address: int) -> str:
        """The text that an initialised variable of the module holds."""
        text = next((x for x in self.constants.values() if x.ctypes.data == int(address)), None)
        return f"{int(address):#x}" if text is None else text.tobytes().rstrip(b"\0").decode()

    def fail(self, threads: Threads, what: str) -> None:
        """Ends the launch, as a failed assertion and a trap do."""
        line = self.code[threads.block_of_code].block.instructions[threads.at].line
        first = f"block {threads.block[0]}, thread {threads.number[0] % self.threads}"
        raise StoppedError(f"{self.kernel.name}, {line}: {first}: {what}")

    def whole_warps(self, threads: Threads, at: int) -> bool:
        """Whether the warps have come together, as an instruction with .sync or .aligned asks."""
        if threads.n % WARP == 0 and (threads.lane.reshape(-1, WARP) == np.arange(WARP)).all():
            return True
        threads.at = at
        self.report(threads, "divergence", np.arange(threads.n), None, "a part of a warp is elsewhere")
        return False


def undefined(count: int, kind: Any) -> Array:
    """Registers that nobody has written, whose values must not matter: as numbers they are NaN."""
    return np.full(count, kind(True) if kind is np.bool_ else kind(np.iinfo(kind).max - 0xDEAD))


def grain(kernel: Kernel, space: str) -> int:
    """The bytes of the smallest access to a memory, at most 4."""
    smallest = 4
    for block in kernel.blocks:
        for instruction in block.instructions:
            if instruction.name in ("ld", "st", "atom", "red") and any(
                x.startswith(space) for x in instruction.modifiers
            ):
                bits = int("".join(filter(str.isdigit, instruction.type)) or 32)
                smallest = min(smallest, bits // 8)
    return smallest


def packed(value: int | float | bytes, size: int, kind: str) -> bytes:
    """An argument as the bytes of a parameter."""
    if isinstance(value, bytes):
        return value
    if kind.startswith("fp"):
        return struct.pack({4: "<f", 8: "<d"}[size], value)
    return (int(value) % 2 ** (8 * size)).to_bytes(size, "little")


__all__ = ["SCHEDULES", "UNSIGNED", "Machine", "StoppedError", "packed"]
