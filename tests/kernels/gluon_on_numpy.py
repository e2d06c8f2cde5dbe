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
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np

from tests.kernels.gluon_memory import Array, Barrier, Buffer, Descriptor, Pointer, ProtocolError, array


class Role(threading.Thread):
    """One of the functions of `warp_specialize`, and what it has under way."""

    def __init__(self, run: Callable[[], None], back: threading.Semaphore) -> None:
        super().__init__(daemon=True)
        self.job, self.back, self.go = run, back, threading.Semaphore(0)
        self.ready: Callable[[], bool] | None = lambda: True  # None once it has ended
        self.error: BaseException | None = None
        self.products: list[Callable[[], None]] = []
        self.stores: list[Callable[[], None]] = []
        self.unfenced: list[Buffer] = []
        self.pace = 1.0  # how much more often than others it has a turn
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

    def allocate_shared_memory(self, dtype: Any, shape: list[int], layout: None) -> Buffer:
        unknown = -1 if dtype is np.int64 else np.nan
        return Buffer(np.full(shape, unknown, dtype), self)

    def init(self, bar: Buffer, count: int) -> None:
        bar.barrier = Barrier(count)

    def expect(self, bar: Buffer, size: int) -> None:
        self.pause()
        bar.barrier.change(1, size)

    def arrive(self, bar: Buffer, count: int = 1, pred: bool = True) -> None:
        self.pause()
        if pred:
            bar.barrier.change(count, 0)

    def wait(self, bar: Buffer, phase: int) -> None:
        self.pause(lambda: bar.barrier.ended(phase))

    def fence_async_shared(self) -> None:
        if self.role is not None:
            for buffer in self.role.unfenced:
                buffer.fenced = True
            self.role.unfenced.clear()

    # Copies and products, which are made at any time after they were asked for.

    def async_load(self, descriptor: Descriptor, start: list[int], bar: Buffer, into: Buffer) -> None:
        self.pause()
        if into.readers or into.filling:
            raise ProtocolError("a copy into memory that is still read, or filled")
        into.filling = True
        into.memory[...] = np.nan

        def arrives() -> None:
            there, here = descriptor.inside(start)
            into.memory[...] = 0
            into.memory[here] = descriptor.matrix[there]
            into.filling = into.empty = False
            bar.barrier.change(0, -descriptor.block_type.nbytes)

        self.copies.append(arrives)

    def async_store(self, descriptor: Descriptor, start: list[int], source: Buffer) -> None:
        self.pause()
        if not source.fenced:
            raise ProtocolError("a copy from memory whose stores no fence has ordered before it")
        source.readers += 1

        def reads() -> None:
            there, here = descriptor.inside(start)
            descriptor.matrix[there] = source.memory[here]
            source.readers -= 1

        self.role.stores.append(reads)

    def store_wait(self, pending: int) -> None:
        role = self.role
        self.pause(lambda: len(role.stores) <= pending)

    def warpgroup_mma(self, a: Buffer, b: Buffer, scores: Array, use_acc: bool, is_async: bool) -> Array:
        self.pause()
        operands = [x.whole or x for x in (a, b)]
        if any(x.filling or x.empty for x in operands):
            raise ProtocolError("a product of memory that is not filled")
        for x in operands:
            x.readers += 1

        def made() -> None:
            product = a.memory @ b.memory
            scores[...] = scores + product if use_acc else product
            for x in operands:
                x.readers -= 1

        self.role.products.append(made)
        return scores

    def warpgroup_mma_wait(self, pending: int, deps: tuple[Array]) -> Array:
        role = self.role
        self.pause(lambda: len(role.products) <= pending)
        return deps[0]

    # Turns.

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
            # In some runs one role is far ahead of others, or of all that happens by itself.
            role.pace = self.draw.choice((0.1, 1, 10))
            role.start()
        try:
            while any(role.ready for role in self.roles):
                possible = self.possible()
                paces = [x.pace if isinstance(x, Role) else 1 for x in possible]
                self.turn(self.draw.choices(possible, paces)[0], back)
        finally:
            self.end(back)
        if self.copies:
            raise ProtocolError("the kernel ended before its copies arrived")

    def possible(self) -> list[Any]:
        """The roles that can run, and the queues from which something can happen."""
        found: list[Any] = [self.copies] if self.copies else []
        for role in self.roles:
            found += [queue for queue in (role.products, role.stores) if queue]
            if role.ready is not None and role.ready():
                found.append(role)
        if not found:
            raise ProtocolError("all roles wait for each other")
        return found

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
