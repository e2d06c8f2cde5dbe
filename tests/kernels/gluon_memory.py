"""What a Gluon kernel's values are on numpy: tensors, pointers, descriptors, shared memory, barriers."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
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
    """Shared memory. `index` gives a part of it, whose state is its own."""

    memory: np.ndarray
    machine: Any  # that lets other roles run, and knows which one this is
    filling: bool = False  # by a copy that has not arrived
    empty: bool = True
    readers: int = 0  # products and stores that have not read it
    fenced: bool = True  # copies can see what ordinary stores wrote
    barrier: Barrier | None = None
    parts: dict[int, Buffer] = field(default_factory=dict)
    whole: Buffer | None = None  # whose transpose this is

    @property
    def shape(self) -> tuple[int, ...]:
        return self.memory.shape

    def index(self, i: int) -> Buffer:
        if not 0 <= i < self.shape[0]:
            raise ProtocolError(f"part {i} of {self.shape[0]}")
        return self.parts.setdefault(int(i), Buffer(self.memory[i], self.machine))

    def permute(self, order: tuple[int, ...]) -> Buffer:
        return Buffer(self.memory.transpose(order), self.machine, whole=self)

    def store(self, value: Array) -> None:
        self.machine.pause()
        if self.readers:
            raise ProtocolError("a store into memory that is still copied from")
        self.memory[...] = value
        self.fenced = False
        self.machine.role.unfenced.append(self)


class Barrier:
    """An mbarrier: a phase ends when all arrivals and all bytes that it expects have come."""

    def __init__(self, count: int) -> None:
        self.count = self.pending = count
        self.bytes = self.phases = 0

    def change(self, arrivals: int, size: int) -> None:
        self.pending -= arrivals
        self.bytes += size
        if self.pending < 0:
            raise ProtocolError("more arrivals than a phase has")
        if self.pending == 0 and self.bytes == 0:
            self.pending, self.phases = self.count, self.phases + 1

    def ended(self, phase: int) -> bool:
        """Whether the phase of this parity that is waited for has ended."""
        return self.phases % 2 != phase
