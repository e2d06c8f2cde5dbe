"""Runs the source of a Gluon kernel on numpy, its roles in turns that are drawn at random.

Gluon has no interpreter. Here a kernel's own Python functions run, with numpy in place of Gluon. Each role
of `warp_specialize` is a thread; one of them runs at a time, from one of its operations to the next. What
happens by itself on a GPU happens here between any two turns: a copy arrives, a product is made, a store
reads its buffer.

What would go wrong in silence on a GPU raises a ProtocolError: roles that wait for each other for ever, and
shared memory that is read before it is filled or written while it is read. Layouts, registers and warps do
not exist here.
"""

from __future__ import annotations

import inspect
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np


class ProtocolError(AssertionError):
    pass


class Array(np.ndarray):
    """A tensor of the kernel."""

    type = SimpleNamespace(layout=None)

    def to(self, dtype: Any) -> Array:
        return self.astype(dtype)

    def permute(self, order: tuple[int, ...]) -> Array:
        return self.transpose(order)

    def split(self) -> tuple[Array, Array]:
        return self[..., 0], self[..., 1]


def array(x: Any) -> Array:
    return np.asarray(x).view(Array)


@dataclass
class Pointer:
    """Addresses in a flat array: of one element, or of as many as `at` has."""

    memory: np.ndarray
    at: Any = 0
    type = SimpleNamespace(layout=None)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, array(self.at + offset))

    def where(self, mask: Any) -> tuple[np.ndarray, np.ndarray]:
        """The mask, and the addresses where it holds; others are 0."""
        mask = np.broadcast_to(True if mask is None else mask, np.shape(self.at))
        at = np.where(mask, self.at, 0)
        if ((at < 0) | (at >= self.memory.size)).any():
            raise ProtocolError("an address beyond its memory")
        return mask, at


@dataclass
class Descriptor:
    """A tensor descriptor: a matrix, and the shape of the blocks that are copied."""

    matrix: np.ndarray
    block: tuple[int, int]
    layout: None = None

    @property
    def dtype(self) -> np.dtype:
        return self.matrix.dtype

    @property
    def block_type(self) -> SimpleNamespace:
        return SimpleNamespace(shape=self.block, nbytes=self.block[0] * self.block[1] * self.dtype.itemsize)

    def inside(self, start: list[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """The part of a block that is inside the matrix: there, and in the block."""
        there = [
            slice(min(s, n), min(s + b, n))
            for s, b, n in zip(start, self.block, self.matrix.shape, strict=True)
        ]
        return tuple(there), tuple(slice(0, s.stop - s.start) for s in there)


@dataclass
class Buffer:
    """Shared memory: `index` gives a part of it, whose state is its own."""

    memory: np.ndarray
    filling: int = 0  # copies into it that have not arrived
    readers: int = 0  # products and stores that have not read it
    empty: bool = True
    fenced: bool = True  # what ordinary stores wrote can be seen by copies
    parts: dict[int, Buffer] = field(default_factory=dict)
    barrier: Barrier | None = None
    of: Buffer | None = None  # whose transpose this is

    @property
    def shape(self) -> tuple[int, ...]:
        return self.memory.shape

    def index(self, i: int) -> Any:
        if not 0 <= i < self.shape[0]:
            raise ProtocolError(f"part {i} of {self.shape[0]}")
        return self.parts.setdefault(int(i), Buffer(self.memory[i]))

    def permute(self, order: tuple[int, ...]) -> Buffer:
        return Buffer(self.memory.transpose(order), of=self)

    @property
    def root(self) -> Buffer:
        return self.of or self


class Barrier:
    """An mbarrier: a phase ends when all arrivals and all bytes that it expects have come."""

    def __init__(self) -> None:
        self.count = self.pending = self.bytes = self.phases = 0

    def begin(self, count: int) -> None:
        self.count = self.pending = count

    def change(self, arrivals: int, size: int) -> None:
        self.pending -= arrivals
        self.bytes += size
        if self.pending < 0:
            raise ProtocolError("more arrivals than a phase has")
        if self.pending == 0 and self.bytes == 0:
            self.pending, self.phases = self.count, self.phases + 1

    def ended(self, phase: int) -> bool:
        """Whether the phase of this parity that is waited for has ended."""
        return self.count > 0 and self.phases % 2 != phase


class Role(threading.Thread):
    """One of the functions of `warp_specialize`, and what it has under way."""

    def __init__(self, run: Callable[[], None], back: threading.Semaphore) -> None:
        super().__init__(daemon=True)
        self.job, self.back, self.go = run, back, threading.Semaphore(0)
        self.ready: Callable[[], bool] | None = lambda: True  # None once it has ended
        self.error: BaseException | None = None
        self.products: list[Callable[[], None]] = []
        self.stores: list[Callable[[], None]] = []
        self.stored: list[Buffer] = []
        self.ending = False

    def run(self) -> None:
        self.go.acquire()
        try:
            if not self.ending:
                self.job()
            if self.stores or self.products:
                raise ProtocolError("a role ended before its stores had read, or its products were made")
        except BaseException as error:  # handed to whoever runs the kernel
            self.error = error
        self.ready = None
        self.back.release()

    def pause(self, ready: Callable[[], bool] = lambda: True) -> None:
        """Lets others run, at least until `ready`."""
        self.ready = ready
        self.back.release()
        self.go.acquire()
        if self.ending:
            raise SystemExit


class Machine:
    """What a kernel finds in place of Gluon, for one program of a grid."""

    def __init__(self, program: int, programs: int, draw: random.Random) -> None:
        self.program, self.programs, self.draw = program, programs, draw
        self.copies: list[Callable[[], None]] = []
        self.roles: list[Role] = []
        self.role: Role | None = None

    def hosted(self, function: Any, seen: dict[Any, Any] | None = None) -> Any:
        """A kernel's function, and all that it calls, as Python functions on this machine."""
        seen = {} if seen is None else seen
        function = getattr(function, "fn", function)
        if function not in seen:
            namespace: dict[str, Any] = {}
            made = FunctionType(function.__code__, namespace, function.__name__, function.__defaults__)
            seen[function] = made
            for name, value in function.__globals__.items():
                if inspect.isfunction(getattr(value, "fn", None)):
                    value = self.hosted(value, seen)
                namespace[name] = getattr(value, "value", value)  # of a constexpr
            namespace.update(self.names())
        return seen[function]

    def names(self) -> dict[str, Any]:
        names = {name: getattr(self, name) for name in dir(Machine) if not name.startswith("_")}
        shared = {
            **{"float32": np.float32, "int32": np.int32, "int64": np.int64, "cdiv": lambda a, b: -(-a // b)},
            **{"exp2": np.exp2, "cast": lambda x, dtype: x, "minimum": np.minimum, "maximum": np.maximum},
            **{"range": lambda *of, **_: range(*of), "static_range": range, "static_assert": check},
            **{"program_id": lambda _: self.program, "num_programs": lambda _: self.programs},
            **{"NVMMADistributedLayout": no_layout, "SliceLayout": no_layout},
        }
        tensors = SimpleNamespace(**{**names, **shared})
        barriers = SimpleNamespace(**{**names, "MBarrierLayout": no_layout})
        copies = SimpleNamespace(store_wait=self.store_wait)
        names = {name: names[name] for name in OPERATIONS}
        return {**names, "gl": tensors, "tl": tensors, "mbarrier": barriers, "tma": copies}

    # Arithmetic.

    def where(self, condition: Any, a: Any, b: Any) -> Any:
        found = np.where(condition, a, b)
        return array(found) if found.shape else found.item()

    def fma(self, a: Any, b: Any, c: Any) -> Array:
        return array((np.float64(a) * b + c).astype(np.float32))

    def max(self, x: Array, axis: int) -> Array:
        return array(x.max(axis))

    def sum(self, x: Array, axis: int) -> Array:
        return array(x.sum(axis))

    def arange(self, start: int, end: int, layout: None) -> Array:
        return array(np.arange(start, end))

    def zeros(self, shape: tuple[int, ...], dtype: Any, layout: None) -> Array:
        return array(np.zeros(shape, dtype))

    def convert_layout(self, x: Any, layout: None, assert_trivial: bool) -> Any:
        return x

    def load(self, pointer: Pointer, mask: Any = None, other: Any = 0) -> Array:
        mask, at = pointer.where(mask)
        return array(np.where(mask, pointer.memory[at], other).astype(pointer.memory.dtype))

    def store(self, pointer: Pointer, value: Any, mask: Any = None) -> None:
        mask, at = pointer.where(mask)
        pointer.memory[at[mask]] = value[mask]

    # Shared memory and barriers.

    def allocate_shared_memory(self, dtype: Any, shape: list[int], layout: None) -> Any:
        return Shared(self, np.full(shape, -1 if dtype is np.int64 else np.nan, dtype))

    def init(self, barrier: Shared, count: int) -> None:
        barrier.buffer.barrier = Barrier()
        barrier.buffer.barrier.begin(count)

    def expect(self, barrier: Shared, size: int) -> None:
        self.pause()
        barrier.buffer.barrier.change(1, size)

    def arrive(self, barrier: Shared, count: int = 1, pred: bool = True) -> None:
        self.pause()
        if pred:
            barrier.buffer.barrier.change(count, 0)

    def wait(self, barrier: Shared, phase: int) -> None:
        self.pause(lambda: barrier.buffer.barrier.ended(phase))

    def fence_async_shared(self) -> None:
        if self.role is not None:
            for buffer in self.role.stored:
                buffer.fenced = True

    # Copies and products, which are made at any time after they were asked for.

    def async_load(self, descriptor: Descriptor, start: list[int], barrier: Shared, into: Shared) -> None:
        self.pause()
        buffer = into.buffer
        if buffer.readers:
            raise ProtocolError("a copy into memory that is still read")
        if buffer.filling:
            raise ProtocolError("two copies into the same memory")
        buffer.filling += 1
        buffer.memory[...] = np.nan

        def arrives() -> None:
            there, here = descriptor.inside(start)
            buffer.memory[...] = 0
            buffer.memory[here] = descriptor.matrix[there]
            buffer.filling, buffer.empty = 0, False
            barrier.buffer.barrier.change(0, -descriptor.block_type.nbytes)

        self.copies.append(arrives)

    def async_store(self, descriptor: Descriptor, start: list[int], source: Shared) -> None:
        self.pause()
        buffer = source.buffer
        if not buffer.fenced:
            raise ProtocolError("a copy from memory whose stores no fence has ordered before it")
        buffer.readers += 1

        def reads() -> None:
            there, here = descriptor.inside(start)
            descriptor.matrix[there] = buffer.memory[here]
            buffer.readers -= 1

        self.role.stores.append(reads)

    def store_wait(self, pending: int) -> None:
        self.pause(lambda: len(self.role_now.stores) <= pending)

    def warpgroup_mma(self, a: Shared, b: Shared, scores: Array, use_acc: bool, is_async: bool) -> Array:
        self.pause()
        operands = [x.buffer.root for x in (a, b)]
        for x in operands:
            if x.filling or x.empty:
                raise ProtocolError("a product of memory that is not filled")
            x.readers += 1

        def made() -> None:
            product = a.buffer.memory @ b.buffer.memory
            scores[...] = scores + product if use_acc else product
            for x in operands:
                x.readers -= 1

        self.role.products.append(made)
        return scores

    def warpgroup_mma_wait(self, pending: int, deps: tuple[Array]) -> Array:
        self.pause(lambda: len(self.role_now.products) <= pending)
        return deps[0]

    # Turns.

    @property
    def role_now(self) -> Role:
        """The role whose condition is looked at."""
        return self.looked_at or self.role

    looked_at: Role | None = None

    def pause(self, ready: Callable[[], bool] = lambda: True) -> None:
        if self.role is not None:
            self.role.pause(ready)

    def warp_specialize(
        self, functions: list[tuple[Any, tuple[Any, ...]]], warps: Any, registers: Any
    ) -> None:
        """Runs the roles until all have ended."""
        back = threading.Semaphore(0)
        self.roles = [Role(lambda f=f, of=of: f(*of), back) for f, of in functions]
        for role in self.roles:
            role.start()
        try:
            while any(role.ready for role in self.roles):
                self.turn(self.draw.choice(list(self.possible())), back)
        finally:
            self.end(back)
        if self.copies:
            raise ProtocolError("the kernel ended before its copies arrived")

    def possible(self) -> Iterator[Role | list[Callable[[], None]]]:
        """The roles that can run, and the queues from which something can happen."""
        found: list[Any] = [self.copies] if self.copies else []
        for role in self.roles:
            self.looked_at = role
            found += [queue for queue in (role.products, role.stores) if queue]
            if role.ready is not None and role.ready():
                found.append(role)
        self.looked_at = None
        if not found:
            raise ProtocolError("all roles wait for each other")
        return iter(found)

    def turn(self, chosen: Any, back: threading.Semaphore) -> None:
        if isinstance(chosen, Role):
            self.role = chosen
            chosen.go.release()
            back.acquire()
            self.role = None
            if chosen.error is not None:
                raise chosen.error
        else:  # Copies may overtake each other; products and stores of a role do not.
            at = self.draw.randrange(len(chosen)) if chosen is self.copies else 0
            chosen.pop(at)()

    def end(self, back: threading.Semaphore) -> None:
        """No thread stays behind, whatever has happened."""
        for role in self.roles:
            if role.ready is not None:
                role.ending = True
                role.go.release()
                back.acquire()
            role.join()


OPERATIONS = (
    *("fence_async_shared", "async_load", "async_store"),
    *("warpgroup_mma", "warpgroup_mma_wait"),
)


class Shared:
    """A kernel's view of a buffer."""

    def __init__(self, machine: Machine, memory: np.ndarray, buffer: Buffer | None = None) -> None:
        self.machine, self.buffer = machine, buffer or Buffer(memory)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.buffer.shape

    def index(self, i: int) -> Shared:
        part = self.buffer.index(i)
        return Shared(self.machine, part.memory, part)

    def permute(self, order: tuple[int, ...]) -> Shared:
        turned = self.buffer.permute(order)
        return Shared(self.machine, turned.memory, turned)

    def store(self, value: Array) -> None:
        self.machine.pause()
        if self.buffer.readers:
            raise ProtocolError("a store into memory that is still copied from")
        self.buffer.memory[...] = value
        self.buffer.fenced = False
        self.machine.role.stored.append(self.buffer)


def check(condition: bool) -> None:
    if not condition:
        raise ProtocolError("a static assertion")


def no_layout(*_: Any) -> None:
    return None


def run(kernel: Any, programs: int, seed: int, **arguments: Any) -> None:
    """Runs a kernel's programs one after another; descriptors and pointers are those of this module."""
    draw = random.Random(seed)
    for program in range(programs):
        machine = Machine(program, programs, draw)
        machine.hosted(kernel)(**arguments)
